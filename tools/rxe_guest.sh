#!/usr/bin/env bash
# Runs a command where there are two verbs devices: in a User-Mode Linux guest with soft-RoCE.
#
#     tools/rxe_guest.sh python -m pytest -m verbs tests/rdma      # its output and its exit status
#     tools/rxe_guest.sh --prepare                                 # only what the first call does: minutes, once
#
# Nothing of the host is changed: the guest's kernel is an ordinary process, and the guest sees the host's files read-only
# below a scratch layer. Two devices, rxe0 (10.77.0.1, fd77::1) and rxe1 (10.77.0.2, fd77::2), each on one end of a
# virtual cable v0-v1: what goes from one to the other really crosses it, and `/run/cable down` cuts it. pyverbs of the
# distribution is on PYTHONPATH; it loads if the interpreter is the distribution's version of CPython.
#
# The kernel is built from Debian's sources and kept in RXE_GUEST_CACHE; RXE_GUEST_KERNEL names one that exists already.
# RXE_GUEST_SECONDS (900) and RXE_GUEST_MEMORY (4G) bound the guest; it stays on processor RXE_GUEST_CPU (the last one).
# Exit status 3: such a guest cannot be had here (needs root, x86-64 and apt-get), 124: it took too long, 125: it failed,
# else the command's.
set -euo pipefail

CACHE=${RXE_GUEST_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/monarch_backend/rxe-guest}
MEMORY=${RXE_GUEST_MEMORY:-4G}
SECONDS_MOST=${RXE_GUEST_SECONDS:-900}
RECIPE=2 # raise it when a kernel that was built before must be built again
KERNEL=${RXE_GUEST_KERNEL:-$CACHE/linux-$RECIPE}

say() { echo "rxe_guest: $*" >&2; }
cannot() { say "cannot be had here: $*"; exit 3; }
failed() { say "$*"; exit 125; }

# ---- what the host needs

packages() { # those of the arguments that are not installed yet
  local missing=() name
  for name; do dpkg -s "$name" >/dev/null 2>&1 || missing+=("$name"); done
  [ ${#missing[@]} -gt 0 ] || return 0
  say "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  local install=(apt-get -o DPkg::Lock::Timeout=600 -qq install -y --no-install-recommends "${missing[@]}")
  "${install[@]}" >"$CACHE/apt.log" 2>&1 && return
  { apt-get -qq update && "${install[@]}"; } >"$CACHE/apt.log" 2>&1 || { tail -n 5 "$CACHE/apt.log" >&2; return 1; }
}

# PCI is what rxe's Kconfig wants, and User-Mode Linux has it over virtio only.
OPTIONS="64BIT CC_OPTIMIZE_FOR_PERFORMANCE MULTIUSER PRINTK BUG BASE_FULL FUTEX EPOLL EVENTFD SIGNALFD TIMERFD SHMEM AIO
  POSIX_TIMERS ADVISE_SYSCALLS MEMBARRIER FILE_LOCKING FHANDLE INOTIFY_USER HIGH_RES_TIMERS NO_HZ_IDLE SYSVIPC POSIX_MQUEUE
  CROSS_MEMORY_ATTACH BINFMT_ELF BINFMT_SCRIPT PROC_FS PROC_SYSCTL SYSFS TMPFS TMPFS_XATTR DEVTMPFS OVERLAY_FS HOSTFS
  TTY UNIX98_PTYS STDERR_CONSOLE NULL_CHAN NAMESPACES NET_NS PID_NS USER_NS IPC_NS UTS_NS
  NET UNIX PACKET INET IPV6 IP_ADVANCED_ROUTER IP_MULTIPLE_TABLES IPV6_MULTIPLE_TABLES NETDEVICES NET_CORE VETH
  VIRTIO_MENU VIRTIO_UML UML_PCI_OVER_VIRTIO
  INFINIBAND INFINIBAND_USER_ACCESS INFINIBAND_ADDR_TRANS RDMA_RXE CRYPTO HW_RANDOM UML_RANDOM"

# What a thread has in vector and matrix registers: 11,008 bytes where the processor has AMX, and Linux 6.1's User-Mode Linux
# has room for 2,696. They are given back as many as they were, or the processor's kernel refuses them. Stacks have them, too.
more_registers() {
  sed -i 's/\(HOST_FP_SIZE, \)2696/\112288/' "$1/user-offsets.c"
  sed -i -e 's/^int have_xstate_support;/&\nstatic unsigned long xstate_bytes;/' \
    -e 's/have_xstate_support = 1;/{ &; xstate_bytes = iov.iov_len; }/;s/1;;/1;/' \
    -e '/^int restore_fp_registers/,/^}/s/FP_SIZE \* sizeof(unsigned long)/xstate_bytes/' "$1/os-Linux/registers.c"
  grep -q 'HOST_FP_SIZE, 12288' "$1/user-offsets.c"
  [ "$(grep -c xstate_bytes "$1/os-Linux/registers.c")" = 3 ]
}

build_kernel() {
  local work sources
  packages linux-source gcc libc6-dev make flex bison bc xz-utils perl || return 1
  sources=$(printf '%s\n' /usr/src/linux-source-*.tar.xz | sort -V | tail -n 1)
  say "building the guest's kernel of $(basename "$sources"); once, some minutes"
  work=$(mktemp -d "$CACHE/build.XXXXXX")
  (
    trap 'rm -rf "$work"' EXIT
    mkdir "$work/source" "$work/out"
    tar -xf "$sources" -C "$work/source" --strip-components=1 --exclude='*/drivers/gpu/*.[ch]' \
      --exclude='*/drivers/media/*.[ch]' --exclude='*/sound/*/*.[ch]' --exclude='*/drivers/net/wireless/*.[ch]' \
      --exclude='*/drivers/net/ethernet/*.[ch]' --exclude='*/drivers/staging/*.[ch]' --exclude='*.dts' --exclude='*.dtsi'
    # One processor: who waits by polling gives it up only when its slice is over.
    sed -i '/^config HZ$/,/default/s/default 100$/default 1000/' "$work/source/arch/um/Kconfig"
    more_registers "$work/source/arch/x86/um"
    for option in $OPTIONS; do echo "CONFIG_$option=y"; done >"$work/options"
    printf 'CONFIG_%s\n' UML_PCI_OVER_VIRTIO_DEVICE_ID=4660 KERNEL_STACK_ORDER=4 >>"$work/options"
    unset ARCH CROSS_COMPILE CFLAGS LDFLAGS MAKEFLAGS MAKELEVEL MFLAGS KBUILD_OUTPUT
    make=(make -C "$work/source" ARCH=um O="$work/out")
    "${make[@]}" KCONFIG_ALLCONFIG="$work/options" allnoconfig
    for option in RDMA_RXE VETH OVERLAY_FS HOSTFS; do grep -q "^CONFIG_$option=y" "$work/out/.config"; done
    nice "${make[@]}" -j"$(nproc)" linux
    strip -o "$work/linux" "$work/out/linux"
    mv "$work/linux" "$KERNEL"
  ) >"$CACHE/build.log" 2>&1 || { tail -n 10 "$CACHE/build.log" >&2; return 1; }
}

prepare() {
  [ "$(uname -sm)" = "Linux x86_64" ] || cannot "this is $(uname -sm), and User-Mode Linux runs on Linux on x86-64"
  [ "$(id -u)" = 0 ] || cannot "this is not root, which apt-get needs"
  command -v apt-get >/dev/null || cannot "there is no apt-get to fetch kernel sources and libibverbs with"
  mkdir -p "$CACHE/python"
  exec 9>"$CACHE/lock"
  flock 9 # two at once would build twice
  packages libibverbs1 ibverbs-providers iproute2 perl-base || failed "packages cannot be installed"
  packages python3-pyverbs || say "no python3-pyverbs: the ibverbs package is all there is"
  ln -sfn /usr/lib/python3/dist-packages/pyverbs "$CACHE/python/pyverbs" # that package alone, not all of the system's
  [ -x "$KERNEL" ] || build_kernel || failed "no kernel; see $CACHE/build.log"
  exec 9>&-
}

# ---- inside

# The first process, on the host's read-only root: puts a scratch layer over it, then goes on there as its own argument.
guest_first='#!/bin/bash
mount -t tmpfs -o size=75% scratch /mnt && mkdir /mnt/upper /mnt/work /mnt/root
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root
mount -t proc proc /mnt/root/proc
exec chroot /mnt/root /bin/bash "${0%/*}/second"'

guest_second=$(cat <<'GUEST'
here=${0%/*}
power_off() { echo 0 >/proc/sys/kernel/printk; exec perl -e "syscall(169, 0xfee1dead, 672274793, 0x4321fedc, 0)"; }
trap power_off EXIT
stty -F /dev/console raw -echo 2>/dev/null
mount -t hostfs -o "$here" none "$here"
mount -t sysfs sysfs /sys; mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/pts /dev/shm; mount -t devpts devpts /dev/pts; mount -t tmpfs tmpfs /dev/shm; mount -t tmpfs tmpfs /run
for name in fd stdin:0 stdout:1 stderr:2; do
  [ -e "/dev/${name%:*}" ] || ln -s "/proc/self/fd${name#"${name%:*}"}" "/dev/${name%:*}"
done
cd /proc/sys/net
echo 100000 >core/netdev_max_backlog # or answers to READs are dropped, and READ crawls
ip link set lo up
ip link add v0 type veth peer name v1
# Both addresses are this kernel's own: without more it would not put such a packet on the cable, nor take it off.
for name in all v0 v1; do echo 0 >"ipv4/conf/$name/rp_filter"; echo 1 >"ipv4/conf/$name/accept_local"; done
cat >/run/cable <<'CABLE'
#!/bin/bash
# cable up|down
for i in 0 1; do
  ip link set "v$i" mtu 9000 "$1"
  [ "$1" = up ] || continue
  for family in -4 -6; do
    case $family in -4) net=10.77.0. bits=24 nodad= ;; -6) net=fd77:: bits=64 nodad=nodad ;; esac
    mine=$net$((i + 1)) other=$net$((2 - i))
    ip "$family" addr replace "$mine/$bits" dev "v$i" $nodad
    ip "$family" neigh replace "$other" lladdr "$(cat "/sys/class/net/v$((1 - i))/address")" dev "v$i" nud permanent
    ip "$family" route replace "$other" dev "v$i" src "$mine" table $((100 + i)) 2>/dev/null
  done
done
CABLE
chmod +x /run/cable
/run/cable up
for i in 0 1; do
  for family in -4 -6; do
    case $family in -4) net=10.77.0. ;; -6) net=fd77:: ;; esac
    ip "$family" rule add pref $((10 + i)) iif "v$i" lookup local
    ip "$family" rule add pref $((20 + i)) from "$net$((i + 1))" to "$net$((2 - i))" lookup $((100 + i))
  done
done
for family in -4 -6; do ip $family rule add pref 100 lookup local && ip $family rule del pref 0; done
for i in 0 1; do rdma link add "rxe$i" type rxe netdev "v$i"; done
ulimit -l unlimited; ulimit -n 65536; ulimit -c 0
( . "$here/environment"; . "$here/command" ) </dev/null
echo $? >"$here/status"
GUEST
)

run() {
  local dir cpu status=0 scratch=/tmp
  dir=$(mktemp -d /var/tmp/rxe-guest.XXXXXX)
  trap 'rm -rf "$dir"' EXIT
  printf '%s\n' "$guest_first" >"$dir/first" && chmod +x "$dir/first"
  printf '%s\n' "$guest_second" >"$dir/second"
  export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$CACHE/python
  declare -px | grep -v '^declare -x \(PWD\|OLDPWD\|SHLVL\|TMPDIR\)=' >"$dir/environment"
  printf 'cd %q && exec' "$PWD" >"$dir/command"
  printf ' %q' "$@" >>"$dir/command"
  # The guest's memory is a file: in /dev/shm, if that is large enough.
  [ "$(df --output=avail -B1 /dev/shm 2>/dev/null | tail -n 1)" -gt "$(numfmt --from=iec "$MEMORY")" ] 2>/dev/null && scratch=/dev/shm
  # The guest has one processor, and its kernel and its processes are processes here that wait for each other: on two
  # processors each system call of the guest would wait until an idle one has woken up, which takes 0.6 ms in some clouds.
  cpu=${RXE_GUEST_CPU:-$(taskset -cp $$ | sed 's/.*[ ,-]//')}
  TMPDIR=$scratch taskset -c "$cpu" timeout --kill-after=5 "$SECONDS_MOST" "$KERNEL" mem="$MEMORY" root=/dev/root rootfstype=hostfs \
    rootflags=/ ro init="$dir/first" con=null con0=null,fd:1 ssl=null quiet panic=1 uml_dir="$dir" </dev/null 2>"$dir/log" || status=$?
  [ -s "$dir/status" ] && exit "$(cat "$dir/status")"
  [ $status = 124 ] && { say "took longer than $SECONDS_MOST s"; exit 124; }
  tail -n 5 "$dir/log" >&2
  failed "the guest ended before the command did (status $status)"
}

[ $# -gt 0 ] || { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2; }
prepare
[ "$1" = --prepare ] || run "$@"
