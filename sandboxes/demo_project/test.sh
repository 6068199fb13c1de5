#!/bin/sh
# Exit status 0: every title became the name that it must become.
failed=0

expect() {
    got=$(sh ./slug.sh "$1")
    if [ "$got" = "$2" ]; then
        printf 'ok    %s\n' "$2"
    else
        printf 'FAIL  "%s" became "%s", not "%s"\n' "$1" "$got" "$2"
        failed=1
    fi
}

expect 'Release Notes' 'release-notes'
expect 'Version 2: what changed' 'version-2-what-changed'
expect 'Done!' 'done'
expect '  spaces around  ' 'spaces-around'
exit "$failed"
