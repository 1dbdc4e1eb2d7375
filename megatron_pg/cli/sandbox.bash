# Usage: bash sandbox.bash isolated|open SCRATCH FOLDER SCRIPT [its arguments]
# Runs SCRIPT with recorder.bash; `isolated`, in new namespaces, with every folder of the root under a scratch layer.
scratch=$2 root=$2/layers/root

# Show $1 at its place below $root: what is written there goes to a layer of its own, or nowhere.
show() {
    local at=$1 layer=$scratch/layers/$((++layers))
    if [[ ! -d $at ]]; then
        : >"$root$at" && mount --bind "$at" "$root$at" && mount -o remount,bind,ro "$root$at"
        return
    fi
    mkdir -p "$root$at" "$layer/upper" "$layer/work"
    mount -t overlay -o "lowerdir=${at//:/\\:},upperdir=$layer/upper,workdir=$layer/work,userxattr" overlay "$root$at" ||
        { mount --rbind "$at" "$root$at" && mount -o remount,bind,ro "$root$at"; }
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
    mkdir -p "$root$scratch" && mount --bind "$scratch" "$root$scratch" || return
    mount -t tmpfs tmpfs "$root/dev/shm" # else the machine's own
    while IFS= read -r -d '' launcher; do # also those that are called with their path
        mount --bind "$scratch/stub" "$root$launcher"
    done <"$scratch/launchers"
}

if [[ $1 == isolated ]]; then
    isolate && : >"$scratch/isolated" && exec chroot "$root" "$BASH" "$0" open "${@:2}"
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
