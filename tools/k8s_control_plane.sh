#!/usr/bin/env bash
# Builds a Kubernetes control plane for tests: kube-apiserver, kube-controller-manager and kube-scheduler.
#
#     tools/k8s_control_plane.sh --prepare    # once: about eight minutes on two idle cores
#     tools/k8s_control_plane.sh --where      # the folder of the programs, which tests/k8s/cluster.py starts
#
# The source is Debian's package "kubernetes" with its vendored dependencies, so only Debian's archive is needed. etcd is
# Debian's own package. The programs are kept in K8S_TESTBED_CACHE.
# Exit status 3: they cannot be built here (needs root, x86-64, and Debian 12 with these packages), 125: the build failed.
set -euo pipefail

CACHE=${K8S_TESTBED_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/monarch_backend/k8s}
RECIPE=1 # raise it when programs that were built before must be built again
BIN=$CACHE/bin-$RECIPE
PROGRAMS="kube-apiserver kube-controller-manager kube-scheduler"
RELEASE=1.20 # of Debian's source package; other distributions have another one, or none
TOOLS="dpkg-dev golang-1.19-go make rsync jq golang-github-modern-go-reflect2-dev"

say() { echo "k8s_control_plane: $*" >&2; }
cannot() { say "cannot be built here: $*"; exit 3; }
failed() { say "$*"; exit 125; }

is_built() { for program in $PROGRAMS; do [ -x "$BIN/$program" ] || return 1; done; }

# Arguments of `apt-get`. Its lists may be stale, and its sources may lack the source packages.
apt() { DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 -qq "$@"; }

distribution() { (. /etc/os-release && echo "$PRETTY_NAME") 2>/dev/null || echo "this distribution"; }

# Ubuntu and other releases of Debian have apt-get, but not all of these packages.
need_packages() {
  local package is_fetched=1
  apt -o APT::Update::Error-Mode=any update || is_fetched=
  for package in "$@"; do
    apt-cache show "$package" >/dev/null 2>&1 && continue
    [ "$is_fetched" ] || failed "apt-get update has failed, and its lists have no package $package"
    cannot "$(distribution) has no package $package; Debian 12 has it"
  done
}

add_sources() { # deb-src entries beside the existing ones, in a folder of their own
  mkdir -p "$CACHE/apt"
  if [ -f /etc/apt/sources.list.d/debian.sources ]; then
    sed 's/^Types:.*/Types: deb-src/' /etc/apt/sources.list.d/debian.sources >"$CACHE/apt/debian.sources"
  elif [ -f /etc/apt/sources.list ]; then
    sed -n 's/^deb /deb-src /p' /etc/apt/sources.list >"$CACHE/apt/debian.list"
  fi
}

# A process of its own, so that `set -e` holds: bash ignores it in functions that are called in conditions.
build() {
  local work reflect2 own
  add_sources
  work=$(mktemp -d "$CACHE/build.XXXXXX")
  trap "rm -rf '$work'" EXIT
  cd "$work"
  mkdir -p lists/partial
  own=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$CACHE/apt" -o "Dir::State::lists=$work/lists")
  apt "${own[@]}" update
  apt-cache "${own[@]}" showsrc --only-source kubernetes | grep "^Version: $RELEASE" >/dev/null ||
    cannot "$(distribution) has no source package kubernetes $RELEASE; Debian 12 has it"
  apt install -y --no-install-recommends $TOOLS
  apt "${own[@]}" source --download-only kubernetes
  dpkg-source --no-check -x kubernetes_*.dsc source
  cd source
  # The vendored reflect2 crashes if Go is newer than 1.17. Debian's package of it does not.
  reflect2=vendor/github.com/modern-go/reflect2
  rm -f $reflect2/*.go $reflect2/*.s
  cp /usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} $reflect2/
  rm -f $reflect2/*_test.go
  mkdir -p go/src/k8s.io home
  ln -sfn ../../.. go/src/k8s.io/kubernetes
  env GOPATH="$PWD/go" HOME="$PWD/home" PATH="/usr/lib/go-1.19/bin:$PATH" CGO_ENABLED=0 GOFLAGS= GOPROXY=off \
    make WHAT="$(printf 'cmd/%s ' $PROGRAMS)"
  mkdir -p "$BIN"
  for program in $PROGRAMS; do mv "_output/local/bin/linux/amd64/$program" "$BIN/"; done
}

prepare() {
  [ "$(uname -sm)" = "Linux x86_64" ] || cannot "this is $(uname -sm)"
  [ "$(id -u)" = 0 ] || cannot "this is not root, which apt-get and network namespaces need"
  command -v apt-get >/dev/null || cannot "there is no apt-get to fetch the source package with"
  mkdir -p "$CACHE"
  exec 9>"$CACHE/lock"
  flock 9 # two at once would build twice
  if ! command -v etcd >/dev/null; then
    need_packages etcd-server
    apt install -y --no-install-recommends etcd-server >"$CACHE/apt.log" 2>&1 ||
      failed "etcd-server cannot be installed; see $CACHE/apt.log"
  fi
  is_built && return
  need_packages $TOOLS
  say "building; once, some minutes"
  local rc=0
  "$0" --build >"$CACHE/build.log" 2>&1 || rc=$?
  [ $rc = 0 ] && return
  tail -n 10 "$CACHE/build.log" >&2
  [ $rc != 3 ] || exit 3
  failed "no control plane; see $CACHE/build.log"
}

case ${1:-} in
--prepare) prepare ;;
--build) build ;;
--where) is_built && echo "$BIN" ;;
*) sed -n '2,/^set -e/p' "$0" | grep '^#' | cut -c3-; exit 2 ;;
esac
