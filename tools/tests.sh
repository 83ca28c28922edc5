# Running the tests of a build, for dev to source: those that are named, and what became of them.

# test_with PRESET [NAME...] [ctest options...]: builds and runs all tests, or those named.
test_with() {
  local preset=$1 names=() tests targets group=OFF
  shift
  while [ $# -gt 0 ] && [[ $1 != -* ]]; do
    names+=("$1")
    shift
  done
  # Of the whole run, tests that share what they include are one program; one that is named is compiled alone.
  if [ "$preset" = test ] && [ ${#names[@]} -eq 0 ]; then group=ON; fi
  configure "$preset" -DCHUNKATTN_GROUP_TESTS=$group -DCHUNKATTN_RELEASE_TESTS="${CHUNKATTN_RELEASE_TESTS:-ON}"
  if [ ${#names[@]} -eq 0 ]; then
    build "$preset"
    run_tests "$preset" "$@"
    return
  fi
  tests=$(named "$preset" "${names[@]}" | sort -u)
  # A script has none; what is not built by a program of its own name has a target of that name.
  targets=$(cmake --build "build/$preset" --target help |
    sed -nE 's/^(\.\.\. )?([^ :]+)(:.*| .*)?$/\2/p' | grep -Fxf <(echo "$tests") || true)
  if [ "$(wc -w <<<"$targets")" -gt 1 ]; then
    configure "$preset" -DCHUNKATTN_NAMED_TARGETS="$(paste -sd';' <<<"$targets")"
    targets=named_targets
  fi
  [ -z "$targets" ] || build "$preset" $targets
  run_tests "$preset" -R "^($(sed 's/[.+]/\\&/g' <<<"$tests" | paste -sd'|'))\$" "$@"
}

# named PRESET NAME...: the tests that have these names, globs allowed, one a line.
named() {
  local all name test found
  all=$(cd "build/$1" && ctest -N | sed -nE 's/^ +Test +#[0-9]+: ([^ ]+).*/\1/p')
  for name in "${@:2}"; do
    found=""
    for test in $all; do
      # shellcheck disable=SC2053  # a glob is one
      if [[ $test == $name ]]; then echo "$test"; found=yes; fi
    done
    [ -n "$found" ] || fail "no test is named '$name'; the nearest: $(nearest "$name" <<<"$all")"
  done
}

# nearest WORD: the three of the lines on stdin that need the fewest letters changed; those that
# contain the word come first.
nearest() {
  awk -v word="$1" '
    function least(a, b) { return a < b ? a : b }
    function distance(a, b,  i, j, above, left) {
      for (j = 0; j <= length(b); ++j) row[j] = j
      for (i = 1; i <= length(a); ++i) {
        left = row[0]; row[0] = i
        for (j = 1; j <= length(b); ++j) {
          above = row[j]
          row[j] = least(least(above, row[j - 1]) + 1, left + (substr(a, i, 1) != substr(b, j, 1)))
          left = above
        }
      }
      return row[length(b)]
    }
    { print (index($0, word) ? 0 : distance(word, $0)), $0 }' | sort -n | sed -n '1,3s/^[0-9]* //p' | paste -sd' '
}

# outcomes LOG: "NAME OUTCOME" of each test that ctest's closing lists name, those that did not pass.
outcomes() { sed -nE 's/^[[:space:]]+[0-9]+ - ([^ ]+) \(([^)]*)\).*/\1 \2/p' "$1"; }

# reason_of NAME LAST_TEST_LOG: what a script that lacks a tool said of it.
reason_of() {
  awk -v name="$1" '/^[0-9]+\/[0-9]+ Testing: / { inside = $3 == name }
    inside && sub(/^SKIPPED: /, "") { print; exit }' "$2"
}

# run_tests PRESET [ctest options...]: then names what was skipped or failed; ends with ctest's summary.
run_tests() {
  local preset=$1 log last name outcome status=0 skipped=() failed=()
  shift
  log=$root/build/$preset-tests.log
  last=build/$preset/Testing/Temporary/LastTest.log
  wait  # for what was begun beside the build
  say "running the tests of $preset"
  # One more than builds have: some tests wait.
  (cd "build/$preset" && ctest -j "$(($(jobs) + 1))" --output-on-failure --no-tests=error "$@") 2>&1 |
    tee "$log" || status=$?
  while read -r name outcome; do
    case $outcome in
      Skipped) skipped+=("$name") ;;
      *) failed+=("$name ($outcome)") ;;
    esac
  done < <(outcomes "$log")

  # Scripts that lack a tool leave with a line "SKIPPED: ...", tests that leave out a part of
  # themselves print "skipped: ...". Neither may look passed.
  if [ ${#skipped[@]} -gt 0 ]; then
    printf '\nSKIPPED, not passed: %s\n' "$(counted ${#skipped[@]} test)"
    for name in "${skipped[@]}"; do printf '    %s: %s\n' "$name" "$(reason_of "$name" "$last")"; done
  fi
  if grep -q '^skipped:' "$last"; then
    printf '\nleft out of tests that passed\n'
    grep -hE '^skipped:' "$last" | sort -u | sed 's/^skipped: /    /'
  fi
  grep -hE '^summary: ' "$last" | sed 's/^summary: /\n/' || true  # what whoever reads only the end should see
  if [ ${#failed[@]} -gt 0 ]; then
    printf '\nFAILED: %s\n' "$(counted ${#failed[@]} test)"
    printf '    %s\n' "${failed[@]}"
    printf 'What they said is above and in build/%s-tests.log. One of them again:\n' "$preset"
    printf '    %s\n' "$(again "$preset" "${failed[0]%% *}")"
  fi
  echo
  grep -E '^[0-9]+% tests passed' "$log" || fail "no test ran"
  return $status
}
counted() { echo "$1 $2$([ "$1" = 1 ] || echo s)"; }
again() {  # again PRESET NAME: the command that runs one test
  case $1 in
    asan | tsan) echo "./dev sanitize $1 $2" ;;
    aarch64) echo "./dev test_aarch64 $2" ;;
    fast) echo "./dev test -R '^$2\$'" ;;
    windows) echo "./dev check windows" ;;
    *) echo "./dev $1 $2" ;;
  esac
}
