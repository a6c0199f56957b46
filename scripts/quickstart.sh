#!/usr/bin/env bash
# From a clone to answers: make the environment, build the demo bundle, ask it about real images, measure it.
set -euo pipefail

root=$(dirname -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")")
cd -- "$root"
bash scripts/environment.sh export,scripts
python=$root/.venv/bin/python
bundle=build/demo-vlm

step() { printf '\n== %s\n' "$*"; }
show() {
    local word line='$ python'
    for word; do
        [[ $word == *\ * ]] && word="\"$word\""
        line+=" $word"
    done
    printf '%s\n' "$line"
    "$python" "$@"
}

step "build: models/demo-vlm -> $bundle"
show export/build.py

step "ask, from the command line: test images of easy-VQA"
"$python" -c '
import easy_vqa
texts, truths, owners = easy_vqa.get_test_questions()
paths = easy_vqa.get_test_image_paths()
for i in (1, 4):
    print(paths[owners[i]], texts[i], truths[i], sep="\t")
' | while IFS=$'\t' read -r image question truth; do
    show -m runtime ask "$bundle" --image "${image#"$root"/}" "$question" </dev/null
    printf '(truth: %s)\n' "$truth"
done

step "ask, from Python: one image and four"
show scripts/ask_easy_vqa.py "$bundle"

step "KV bytes and accuracy: compressed against uncompressed"
show scripts/accuracy.py "$bundle" --levels off,balanced,extreme --suites easy1,page4 --limit 50
