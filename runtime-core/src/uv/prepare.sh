# Publishes a script, makes sure that uv is there, builds the script's environment, and prints the path of its
# interpreter as the last line. Nothing but uv's answer may go to standard output.
#
# $1 the script as it was uploaded   $2 its final path   $3 a uv binary, or nothing   $4 where the installer is
set -e

# A directory in the way would swallow the file instead of being replaced by it.
if [ -d "$2" ]; then rm -rf -- "$2"; fi
mv -f -- "$1" "$2"

local_bin="${HOME:-/tmp}/.local/bin"
PATH="$local_bin:${PATH:-/usr/local/bin:/usr/bin:/bin}"
UV_INSTALL_DIR="$local_bin"
export PATH UV_INSTALL_DIR

have() { command -v "$1" >/dev/null 2>&1; }

with_pip() {
    have python3 && python3 -m pip install --user --quiet --upgrade --disable-pip-version-check uv && have uv
}

downloader() {
    if have curl || have wget; then return 0; fi
    if have apt-get; then
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq && apt-get install -y -qq --no-install-recommends curl ca-certificates || return 1
    elif have apk; then
        apk add -q --no-cache curl ca-certificates || return 1
    fi
    have curl || have wget
}

# Into a file first: a download that breaks off must not be run up to where it broke.
download() {
    if have curl; then curl -fsSL -o "$2" "$1"; else wget -q -O "$2" "$1"; fi
}

with_installer() {
    downloader || return 1
    installer=$(mktemp) || return 1
    if download "$1" "$installer" && INSTALLER_NO_MODIFY_PATH=1 UV_NO_MODIFY_PATH=1 sh "$installer"; then
        rm -f -- "$installer"
    else
        rm -f -- "$installer"
        return 1
    fi
    have uv
}

uv=uv
if [ -n "$3" ]; then
    uv=$3
elif ! have uv && ! with_pip >&2 && ! with_installer "$4" >&2; then
    echo "uv is not installed, and neither pip nor the installer at $4 could install it" >&2
    exit 1
fi

"$uv" sync --script "$2" -q --no-config >&2
"$uv" python find --script "$2" --no-config
