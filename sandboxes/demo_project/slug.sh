#!/bin/sh
# Print a title as the name of a file: small letters and digits, one hyphen for everything between them.
printf '%s\n' "$(printf '%s' "$1" | tr 'A-Z' 'a-z' | tr -cs 'a-z0-9' '-')"
