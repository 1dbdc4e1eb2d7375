# Usage: bash sandbox.bash isolated|open SCRATCH FOLDER SCRIPT [its arguments]
# Runs SCRIPT with recorder.bash; `isolated`, in new namespaces, with every folder of the root under a scratch layer.
scratch=$2 root=$2/layers/root

# A layer over folder $1, to which goes what is written there.
layer() {
    local at=$1 layer=$scratch/layers/$((++layers))
    mkdir -p "$root$at" "$layer/upper" "$layer/work"
    mount -t overlay -o "lowerdir=${at//:/\\:},upperdir=$layer/upper,workdir=$layer/work,userxattr" overlay "$root$at"
}

# Show $1 at its place below $root, under a layer or to be read only.
show() {
    if [[ ! -d $1 ]]; then
        : >"$root$1" && mount --bind "$1" "$root$1" && mount -o remount,bind,ro "$root$1"
    else
        layer "$1" || { mount --rbind "$1" "$root$1" && mount -o remount,bind,ro "$root$1"; }
    fi
}

# The same for a folder that may have other mounts below it, which the kernel lets no layer cover.
show_all() {
    local folder=$1 entry
    mkdir -p "$root$folder"
    for entry in "${folder%/}"/{*,.[!.]*,..?*}; do
        case $entry in
        /proc | /sys | /dev) mkdir "$root$entry" && mount --rbind "$entry" "$root$entry" ;;
        "$scratch") ;;
        *)
            if [[ -L $entry ]]; then
                cp -P "$entry" "$root$entry"
            elif [[ -d $entry && ${mounts[*]} == *" $entry/"* ]]; then
                show_all "$entry"
            elif [[ -e $entry ]]; then
                show "$entry"
            fi
            ;;
        esac || return
    done
}

isolate() {
    local at launcher mounts=(" ")
    while read -r _ _ _ _ at _; do
        printf -v at %b "$at"
        mounts+=("$at")
    done </proc/self/mountinfo
    shopt -s nullglob
    mount -t tmpfs tmpfs "$scratch/layers" && show_all / || return
    mount -t tmpfs tmpfs "$root/dev/shm" # else the machine's own
    for at in "${HOME-}" "$1" "$2"; do # a layer cannot copy the folders above them, where those are another user's
        [[ $at == /*[!/]* && -d $at ]] && layer "$at"
    done
    mkdir -p "$root$scratch" && mount --bind "$scratch" "$root$scratch" || return
    while IFS= read -r -d '' launcher; do # also those that are called with their path
        mount --bind "$scratch/stub" "$root$launcher" || :
    done <"$scratch/launchers"
}

if [[ $1 == isolated ]]; then
    isolate "$3" "$(cd -- "$3" && realpath -- "$(dirname -- "$4")")" && : >"$scratch/isolated" &&
        exec chroot "$root" "$BASH" "$0" open "${@:2}"
    exit 1
fi

ulimit -f 65536 # KiB of a file
cd -- "$3" || exit
set -- "$scratch" "${@:4}"
# Beside the script, wait for its background jobs: until nobody holds the pipe.
{
    export __PG=$1 __PG_BASH=$BASH BASH_ENV=$1/recorder.bash PATH=$1/bin
    shift
    "$BASH" -- "$@" 61>&1 >>"$__PG/output" 2>&1 </dev/null
    echo $? >"$__PG/code"
} | cat
