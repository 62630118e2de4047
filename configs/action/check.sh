#!/usr/bin/env bash
# The step of action.yml that checks: inputs come as DUAT_*, never as text of a command line that a shell reads.
# Annotations go to standard output, the summary to $GITHUB_STEP_SUMMARY, outputs to $GITHUB_OUTPUT.
set -uo pipefail

undecided() {
  echo "::error title=duat::$1"
  echo "result=undecided" >> "$GITHUB_OUTPUT"
  [ "$DUAT_FAIL_ON" != never ] || exit 0
  exit 2
}

[ -n "$DUAT_MODEL" ] || undecided "input model: missing; give a folder or a hub id"
for name in CHAT WEIGHTS_ONLY; do
  input="DUAT_$name"
  case "${!input}" in
    true | false) ;;
    *) undecided "input $(echo "${name//_/-}" | tr A-Z a-z): expected true or false" ;;
  esac
done
case "$DUAT_FAIL_ON" in
  findings | undecided | never) ;;
  *) undecided "input fail-on: expected findings, undecided or never" ;;
esac

folder="$(mktemp -d "$RUNNER_TEMP/duat-check.XXXXXX")"
arguments=()
[ -z "$DUAT_POLICY" ] || arguments+=("--policy=$DUAT_POLICY")
[ -z "$DUAT_BASELINE" ] || arguments+=("--baseline=$DUAT_BASELINE")
[ -z "$DUAT_BASE" ] || arguments+=("--base=$DUAT_BASE")
[ -z "$DUAT_ADAPTER" ] || arguments+=("--adapter=$DUAT_ADAPTER")
[ -z "$DUAT_PROMPTS" ] || arguments+=("--prompts=$DUAT_PROMPTS")
[ "$DUAT_CHAT" = false ] || arguments+=(--chat)
[ "$DUAT_WEIGHTS_ONLY" = false ] || arguments+=(--weights-only)

"$DUAT" check "${arguments[@]}" --format github \
  --report "json=$folder/duat.json" --report "sarif=$folder/duat.sarif" --report "markdown=$folder/duat.md" \
  -- "$DUAT_MODEL"
code=$?

case $code in
  0) result=passed ;;
  1) result=failed ;;
  *) result=undecided ;;
esac
{
  echo "result=$result"
  [ ! -s "$folder/duat.json" ] || echo "report=$folder/duat.json"
  [ ! -s "$folder/duat.sarif" ] || echo "sarif=$folder/duat.sarif"
} >> "$GITHUB_OUTPUT"
[ ! -s "$folder/duat.md" ] || cat "$folder/duat.md" >> "$GITHUB_STEP_SUMMARY"

case "$DUAT_FAIL_ON-$result" in
  *-passed | never-* | undecided-failed) exit 0 ;;
  *) exit "$code" ;;
esac
