#!/bin/sh
# From `git clone` to a signed bundle in a registry, pulled into an empty environment and answering:
#
#   sh docs/release_walkthrough.sh REPOSITORY RECIPE PLACE TEXT
#   sh docs/release_walkthrough.sh https://example.com/optimize.git recipes/minilm-int8.yaml \
#     oci://localhost:5000/minilm "what a lovely film"
#
# PLACE: oci://HOST/NAME, oci-layout:FOLDER or file:///FOLDER. RECIPE: of the repository, or a path of
# one's own from the root. Everything it makes lies in WORK (a new folder). OPTIMIZE is the command
# where the toolchain is installed already; else `make` installs it, which takes minutes.
set -eu
repository=$1 recipe=$2 place=$3 text=$4
work=${WORK:-$(mktemp -d)}
say() { echo "release: $*" >&2; }

say "clone $repository into $work/source"
git clone --quiet "$repository" "$work/source"
cd "$work/source"
if [ -z "${OPTIMIZE:-}" ]; then
  make .venv/.installed
  OPTIMIZE=$work/source/.venv/bin/optimize
fi

say "a key of one's own, the lock, and the run that is held to it"
openssl ecparam -name prime256v1 -genkey -noout -out "$work/private.pem"
openssl ec -in "$work/private.pem" -pubout -out "$work/public.pem" 2>/dev/null
$OPTIMIZE lock "$recipe" --out "$work/lock.json"
$OPTIMIZE step "$recipe" --outputs "$work/outputs" --lock "$work/lock.json" \
  --store "$work/store" --artifacts "$work/artifacts"
bundle=$(cat "$work/outputs/bundle")

say "sign, describe and publish $bundle to $place, and let production name it"
$OPTIMIZE sign "$bundle" --key "$work/private.pem"
$OPTIMIZE attest "$bundle" --key "$work/private.pem"
$OPTIMIZE publish "$bundle" "$place:1"
$OPTIMIZE promote "$place:1" --to production --require-signature "$work/public.pem"

say "pull what production names into $work/pulled"
$OPTIMIZE pull "$place:production" --to "$work/pulled" --require-signature "$work/public.pem"

say "an environment with the bundle's own requirements and nothing else, in which it answers"
python3 -m venv "$work/empty"
"$work/empty/bin/python" -m pip install --quiet --disable-pip-version-check \
  -r "$work/pulled/requirements.txt"
cd "$work/pulled"
env -u PYTHONPATH "$work/empty/bin/python" -m harness check >&2
env -u PYTHONPATH "$work/empty/bin/python" -m harness predict --json "$text"
