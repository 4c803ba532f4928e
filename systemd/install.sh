#!/bin/sh
# Install kvd on this machine: a venv in /opt/kvd, the units, its user, its configuration, and the default model in /var/lib/kvd/models.
# It is what `make install` does on the machine that will run the daemon. Run as root from a checkout; run again to upgrade.
#
#   install.sh [--unit-only]    --unit-only: kvd is in PREFIX already, and the model is there or not needed
#
# PREFIX       where the venv goes (/opt/kvd)
# PYTHON       the interpreter that it uses, 3.11 or later, outside the home directories (/usr/bin/python3)
# CONSTRAINTS  a pip constraints file (.ci/constraints.txt: the versions that the tests ran with); empty: the newest that kvd accepts
set -eu
umask 022
cd "$(dirname "$0")/.."
PREFIX=${PREFIX:-/opt/kvd}
PYTHON=${PYTHON:-/usr/bin/python3}
CONSTRAINTS=${CONSTRAINTS-.ci/constraints.txt}

refuse() {
  status=$1
  shift
  echo "make install: $*" >&2
  exit "$status"
}

install_packages() {
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || refuse 78 "$PYTHON is missing or older than 3.11; set PYTHON="
  case $("$PYTHON" -c 'import sys; print(sys.base_prefix)') in
    /root* | /home*) refuse 78 "$PYTHON lies in a home directory, which the unit can't see (ProtectHome=yes); set PYTHON=" ;;
  esac
  [ -e /dev/nvidiactl ] || echo "no NVIDIA device here: with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" \
    "pip finds a torch that is gigabytes smaller"

  echo "installing into $PREFIX"
  "$PYTHON" -m venv "$PREFIX"
  # Built from a copy: a build as root would leave files of root's in the checkout.
  sources=$(mktemp -d)
  trap 'rm -rf "$sources"' EXIT
  cp -r pyproject.toml README.md LICENSE kvd clients "$sources"
  "$PREFIX/bin/python" -m pip install --disable-pip-version-check ${CONSTRAINTS:+-c "$CONSTRAINTS"} "$sources/clients/python" "$sources[http]"
}

install_unit() {
  ln -sf "$PREFIX/bin/kvd" /usr/local/bin/kvd
  for unit in kvd.service kvd-gateway.service; do
    install -D -m 644 "systemd/$unit" "/etc/systemd/system/$unit"
    [ "$PREFIX" = /opt/kvd ] || sed -i "s#/opt/kvd/#$PREFIX/#" "/etc/systemd/system/$unit"
  done
  install -D -m 644 systemd/kvd.sysusers.conf /usr/lib/sysusers.d/kvd.conf
  install -D -m 644 systemd/kvd.tmpfiles.conf /usr/lib/tmpfiles.d/kvd.conf
  [ -e /etc/kvd/kvd.toml ] || install -D -m 644 systemd/kvd.toml /etc/kvd/kvd.toml
  systemd-sysusers kvd.conf
  systemd-tmpfiles --create kvd.conf
  [ ! -d /run/systemd/system ] || systemctl daemon-reload
}

install_model() {
  KVD_MODELS_DIR=/var/lib/kvd/models "$PREFIX/bin/kvd" pull smollm2
  chown -R kvd:kvd /var/lib/kvd/models
  chmod 0644 /var/lib/kvd/models/*.gguf
}

[ "$(id -u)" = 0 ] || refuse 77 "needs root (it writes $PREFIX, /etc/kvd and the systemd unit)"
case ${1:-} in
  "")
    install_packages
    install_unit
    install_model
    echo "installed; start it with: systemctl start kvd   (at every boot: systemctl enable --now kvd; after an upgrade: systemctl restart kvd)"
    ;;
  --unit-only) install_unit ;;
  *) refuse 64 "unknown option $1" ;;
esac
