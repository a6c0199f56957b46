#!/usr/bin/env bash
# Prepare a Jetson with JetPack 6.1, 6.2 or 7.2: packages, a virtual environment, the TensorRT plugins; power and swap.
#
#     scripts/jetson_setup.sh --dry-run                        print every command, run none; elsewhere, for JetPack 6.2
#     scripts/jetson_setup.sh                                  packages, environment, plugins for Orin
#     scripts/jetson_setup.sh --power-mode 0 --clocks --headless --swap 16
#
#     --venv DIR        the environment (default: .venv-jetson in this checkout)
#     --arch N          compute capability that the plugins are compiled for (default: 87, Orin)
#     --power-mode N    sudo nvpmodel -m N; the modes are in /etc/nvpmodel.conf
#     --clocks          sudo jetson_clocks: until the next boot, the power mode's highest clocks
#     --headless        no desktop from the next boot on: its memory is the model's
#     --swap GIB        a swap file of so many GiB, at least 1, in place of compressed swap in memory, for building
#                       plans (default: swap stays as it is)
#
# scripts/jetson.md says why. Nothing but what the options name is changed beside packages and the environment.
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
release_file=${JETSON_RELEASE:-/etc/nv_tegra_release} # the variable is for tests
swap_file=/swapfile
export PATH=/usr/local/cuda/bin:$PATH # nvcc
venv=$root/.venv-jetson arch=87 power='' clocks='' headless='' swap='' dry='' given='' elsewhere=''

die() {
    printf 'error: %s\n' "${*//$'\n'/ }" >&2
    exit 2
}

run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [[ -n $dry ]] || "$@"
}

# What is so on this machine is not asked of another one.
here() { [[ -z $elsewhere ]] && "$@"; }

# Sets `given` to the number without leading zeros: bash, fallocate and others take 010 for 8.
number() {
    [[ $2 =~ ^0*([0-9]{1,6})$ ]] || die "$1 needs a whole number below a million, got '$2'"
    given=${BASH_REMATCH[1]}
}
positive() {
    number "$1" "$2"
    [[ $given != 0 ]] || die "$1 needs at least 1, got '$2'"
}

while (($#)); do
    [[ $1 != --*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}" # --swap=8
    case $1 in
        --dry-run) dry=yes ;;
        --clocks) clocks=yes ;;
        --headless) headless=yes ;;
        --venv | --arch | --power-mode | --swap)
            [[ ${2:--} != -* ]] || die "$1 needs a value${2:+, and $2 looks like an option}: see  scripts/jetson_setup.sh --help"
            case $1 in
                --venv) venv=$2 ;;
                --arch) positive "$1" "$2" && arch=$given ;;
                --power-mode) number "$1" "$2" && power=$given ;;
                --swap) positive "$1" "$2" && swap=$given ;;
            esac
            shift
            ;;
        -h | --help)
            sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' -- "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *) die "unknown option $1: see  scripts/jetson_setup.sh --help" ;;
    esac
    shift
done

if [[ -r $release_file ]]; then
    release=$(<"$release_file")
else
    none="this is no Jetson (there is no $release_file)"
    [[ -n $dry ]] || die "$none: run this on the device"
    printf '%s: what JetPack 6.2 would be told\n' "$none"
    elsewhere=yes release='R36 (release), REVISION: 4'
fi
[[ $release =~ R([0-9]+)\ \(release\),\ REVISION:\ ([0-9]+) ]] || die "$release_file names no release of Jetson Linux"
release=$((10#${BASH_REMATCH[1]})) revision=$((10#${BASH_REMATCH[2]}))
case $release in
    36)
        ((revision >= 4)) || die "Jetson Linux $release.$revision is older than JetPack 6.1: update to JetPack 6.2"
        jetpack="6 (TensorRT 10.3, CUDA 12.6, Python 3.10)" cuda=12
        ;;
    39) jetpack="7.2 (TensorRT 10.16, CUDA 13, Python 3.12)" cuda=13 ;;
    *) die "Jetson Linux $release is not known here: this is for JetPack 6.1 and 6.2 (36.4) and 7.2 (39)" ;;
esac
[[ -z $swap ]] || ! here test -e "$swap_file" || die "$swap_file is there already: free -h shows the swap that is in use"
printf 'Jetson Linux %s.%s: JetPack %s\n' "$release" "$revision" "$jetpack"

if ! here /usr/bin/python3 -c 'import tensorrt' 2>/dev/null || [[ ! -x /usr/local/cuda/bin/nvcc ]]; then
    run sudo apt-get update
    run sudo apt-get install -y nvidia-jetpack
fi
here /usr/bin/python3 -c 'import ensurepip' 2>/dev/null || run sudo apt-get install -y python3-venv

# The system's Python: JetPack's TensorRT is compiled for it, and lies in its packages.
here test -x "$venv/bin/python" || run /usr/bin/python3 -m venv --system-site-packages "$venv"
run "$venv/bin/python" -m pip install --disable-pip-version-check --editable "${root}[serve]" "cuda-bindings==$cuda.*" onnx
run "$venv/bin/python" -c 'import tensorrt; print("TensorRT", tensorrt.__version__)'
run "$venv/bin/python" -m engines.plugins build --arch "$arch"

[[ -z $power ]] || run sudo nvpmodel -m "$power"
[[ -z $clocks ]] || run sudo jetson_clocks
[[ -z $headless ]] || run sudo systemctl set-default multi-user.target
if [[ -n $swap ]]; then
    if [[ -n $elsewhere ]] || systemctl cat nvzramconfig >/dev/null 2>&1; then run sudo systemctl disable nvzramconfig; fi
    run sudo fallocate -l "${swap}G" "$swap_file"
    run sudo chmod 600 "$swap_file"
    run sudo mkswap "$swap_file"
    run sudo swapon "$swap_file"
    run sudo sh -c "echo '$swap_file none swap sw 0 0' >>/etc/fstab"
fi

printf -v activate %q "$venv/bin/activate"
cat <<END
Next, for a bundle that was copied to this device:
  . $activate
  python -m engines plans BUNDLE --backend trt
  python -m runtime info BUNDLE
END
