#!/bin/sh
# Turns the process into the PID 1 of a machine of its own. Runs in new mount, PID, UTS, IPC, network and cgroup namespaces:
#   private_machine.sh WORK [SOURCE:TARGET]...
# The machine's root is an overlay of / whose upper layer is a tmpfs on WORK, so that nothing written inside reaches the files outside.
# Each SOURCE is bound to TARGET in it, read-only.
set -eu
work=$1
shift

mount -t tmpfs -o mode=755 tmpfs "$work"
root=$work/root
mkdir "$work/upper" "$work/work" "$root"
mount -t overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" overlay "$root"

# The kernel's own file systems. What is not in a namespace (sysctl, sysrq) stays out of reach.
mount -t proc proc "$root/proc"
for path in sys sysrq-trigger; do
  [ -e "$root/proc/$path" ] || continue
  mount --bind "$root/proc/$path" "$root/proc/$path"
  mount -o remount,bind,ro "$root/proc/$path"
done
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
for device in null zero full random urandom tty; do
  : >"$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
for name in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do ln -s "/proc/self/${name#*:}" "$root/dev/${name%%:*}"; done
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
resolv_conf=$(cat /etc/resolv.conf 2>/dev/null || true)
mount -t tmpfs -o mode=755 tmpfs "$root/run"

# A machine that starts nothing but what systemd itself brings. The id keeps it from a first boot, which would enable units.
etc=$root/etc
rm -rf "$etc/systemd/system" "$etc/resolv.conf" "$etc/machine-id"
mkdir -p "$etc/systemd/system"
: >"$etc/fstab"
printf '%s\n' "$resolv_conf" >"$etc/resolv.conf"
tr -d - </proc/sys/kernel/random/uuid >"$etc/machine-id"
ln -s /lib/systemd/system/multi-user.target "$etc/systemd/system/default.target"
for unit in getty@ console-getty modprobe@ systemd-modules-load systemd-logind systemd-udevd systemd-resolved systemd-timesyncd systemd-networkd; do
  ln -s /dev/null "$etc/systemd/system/$unit.service"
done
echo kvd-test >"$etc/hostname"

for bind; do
  target=$root${bind#*:}
  mkdir -p "$target"
  mount --bind "${bind%%:*}" "$target"
  mount -o remount,bind,ro "$target"
done

cd "$root"
mkdir .outside
pivot_root . .outside
exec chroot . /bin/sh -euc '
  umount -l /.outside
  rmdir /.outside
  exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin container=kvd-test /lib/systemd/systemd --system --log-target=journal --show-status=no'
