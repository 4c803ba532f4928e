#!/bin/sh
# Install kvd on this machine: a venv in /opt/kvd, the unit, its user, its configuration, and the default model in /var/lib/kvd/models.
# DESTDIR-less on purpose: it is what `make install` does on the machine that will run the daemon. Run as root from a checkout.
set -eu
cd "$(dirname "$0")/.."
PREFIX=${PREFIX:-/opt/kvd}
PYTHON=${PYTHON:-/usr/bin/python3}
[ "$(id -u)" = 0 ] || { echo "make install: needs root (it writes $PREFIX, /etc/kvd and the systemd unit)" >&2; exit 77; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make install: $PYTHON is older than 3.11; set PYTHON=" >&2; exit 78; }

echo "installing into $PREFIX"
"$PYTHON" -m venv --copies "$PREFIX"
"$PREFIX/bin/python" -m pip install -q --upgrade pip
# CONSTRAINTS names a pip constraints file, for machines that want exact versions (the project's own is .ci/constraints.txt).
"$PREFIX/bin/python" -m pip install -q ${CONSTRAINTS:+-c "$CONSTRAINTS"} ./clients/python
"$PREFIX/bin/python" -m pip install -q ${CONSTRAINTS:+-c "$CONSTRAINTS"} .
ln -sf "$PREFIX/bin/kvd" /usr/local/bin/kvd

install -D -m 644 systemd/kvd.service /etc/systemd/system/kvd.service
[ "$PREFIX" = /opt/kvd ] || sed -i "s#/opt/kvd/#$PREFIX/#" /etc/systemd/system/kvd.service
install -D -m 644 systemd/kvd.sysusers.conf /usr/lib/sysusers.d/kvd.conf
install -D -m 644 systemd/kvd.tmpfiles.conf /usr/lib/tmpfiles.d/kvd.conf
[ -e /etc/kvd/kvd.toml ] || install -D -m 644 systemd/kvd.toml /etc/kvd/kvd.toml
systemd-sysusers kvd.conf
systemd-tmpfiles --create kvd.conf

KVD_MODELS_DIR=/var/lib/kvd/models "$PREFIX/bin/kvd" pull smollm2
chown -R kvd:kvd /var/lib/kvd
chmod 0644 /var/lib/kvd/models/*.gguf
[ ! -d /run/systemd/system ] || systemctl daemon-reload
echo "installed; start it with: systemctl start kvd   (or: systemctl enable --now kvd)"
