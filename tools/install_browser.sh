#!/bin/sh
# install_browser.sh BIN: install what `make test-browser` needs, unless it is installed:
# Playwright with the pip of BIN, and Chromium with apt-get. Playwright uses the
# installed Chromium, so it downloads no browser.
set -eu
bin=$1

for name in chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then browser=$name; break; fi
done
if [ -z "${browser:-}" ]; then
  if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "Chromium is not installed. Fix: install it with your package manager." >&2
    exit 3
  fi
  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium
fi
"$bin/python" -c 'import playwright' 2>/dev/null || "$bin/pip" install -q playwright
