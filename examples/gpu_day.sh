#!/usr/bin/env bash
# Forty minutes of one GPU: the tests that need one, every benchmark at real sizes, and steps of a main network of each
# paper, from which the seconds of an epoch follow.
#
#   examples/gpu_day.sh [OUT]            on the first CUDA device; OUT is runs/gpu_day if absent
#   examples/gpu_day.sh --quick [OUT]    ten minutes: the tests of networks and kernels, and three benchmarks
#   examples/gpu_day.sh --dry-run [OUT]  on the CPU, kernels in Triton's interpreter, toy sizes: to see that it runs
#
# Writes OUT/gpu_day.json (every step with its seconds, exit status and records) and OUT/gpu_day.md (a table), and the
# output of each step beside them. A step that fails or takes too long does not stop the others; then the exit status
# is 1.
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
dry=0 quick=0
if [ "${1:-}" = --dry-run ]; then dry=1; shift; fi
if [ "${1:-}" = --quick ]; then quick=1; shift; fi
out=${1:-runs/gpu_day}
mkdir -p "$out"
rm -f "$out"/*.json "$out"/*.log "$out"/steps.tsv
export PYTHONPATH="$PWD:$PWD/datasets${PYTHONPATH:+:$PYTHONPATH}"

if [ $dry = 1 ]; then
  export TRITON_INTERPRET=1 LIEATTN_BACKEND=triton OMP_NUM_THREADS=1
  device=cpu repeats=1 extra=(--small) limit=900
  benchmarks=(whole-clouds)
  longest=600
  tests=(tests/test_triton_layers.py -k "hardly_any and no_points or hardly_any and joint-one")
else
  "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' || {
    echo "gpu_day: torch finds no CUDA device here; --dry-run needs none" >&2
    exit 2
  }
  device=cuda repeats=10 extra=() limit=240
  # Real sizes: 64 images of 28 x 28; 100,000 points x 24 frames; molecules as in QM9, 128 in a batch.
  benchmarks=(attention whole-clouds epochs scaling gsa-net attentive framewise lietransformer)
  benchmarks+=(lifts scales)
  mapfile -t tests < <(grep -l mark.gpu tests/*.py)
  longest=900
  if [ $quick = 1 ]; then
    tests=(tests/test_gpu.py tests/test_captured.py tests/test_waiting.py tests/test_triton_layers.py tests/test_triton.py)
    benchmarks=(attention epochs whole-clouds) limit=100 longest=300
  fi
  # Names of tests are printed at once, so that they are known if there is no time for all.
  tests+=(-m gpu -n auto -p no:benchmark -vv)
fi

# step NAME SECONDS COMMAND...: run it, keep its output, note its seconds and exit status.
step() {
  local name=$1 longest=$2 started=$SECONDS
  shift 2
  echo "gpu_day: $name"
  timeout "$longest" "$@" > "$out/$name.log" 2>&1
  printf '%s\t%s\t%s\n' "$name" "$?" "$((SECONDS - started))" >> "$out/steps.tsv"
}

step info 120 "$python" -m lieattn info
step tests $longest "$python" -m pytest -p no:cacheprovider "${tests[@]}"
for name in "${benchmarks[@]}"; do
  step "bench-$name" $limit \
    "$python" -m lieattn bench "$name" --device $device --repeats $repeats "${extra[@]}" --json "$out/bench-$name.json"
done

"$python" - "$out" <<'PYTHON'
import json
import math
import sys
from pathlib import Path

import torch

out = Path(sys.argv[1])
cuda = torch.cuda.is_available()
report = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else "cpu", "steps": {}}
lines = [f"# {report['device']}, torch {report['torch']}", "", "| step | seconds | exit status |", "| --- | --- | --- |"]
records = []
for line in (out / "steps.tsv").read_text().splitlines():
    name, status, seconds = line.split("\t")
    found = out / f"{name}.json"
    content = json.loads(found.read_text()) if found.exists() else []
    report["steps"][name] = {"status": int(status), "seconds": int(seconds), "records": content}
    lines.append(f"| {name} | {seconds} | {status} |")
    records += [(name.removeprefix("bench-"), record) for record in content if "way" in record]


def shown(record, name, digits):
    value = record.get(name)
    return "" if value is None or math.isnan(value) else f"{value:.{digits}f}"


columns = [("step_ms", 2), ("forward_ms", 2), ("peak_mb", 1)]
columns += [("gflops", 0), ("gbytes", 0), ("compute", 3), ("bandwidth", 3)]
lines += ["", f"| benchmark | case | way | {' | '.join(name for name, _ in columns)} |"]
lines.append("| --- " * (3 + len(columns)) + "|")
for name, record in records:
    way = " ".join(filter(None, (record["way"], record.get("pass_"))))
    cells = (name, record["case"], way, *(shown(record, *column) for column in columns))
    lines.append(f"| {' | '.join(cells)} |")
(out / "gpu_day.json").write_text(json.dumps(report, indent=1) + "\n")
(out / "gpu_day.md").write_text("\n".join(lines) + "\n")
lines = [line for line in (out / "tests.log").read_text().splitlines() if " FAILED " in line]
if lines:
    (out / "gpu_day.md").write_text((out / "gpu_day.md").read_text() + "\n" + "\n".join(lines) + "\n")
failed = [name for name, step in report["steps"].items() if step["status"]]
print(f"gpu_day: {out}/gpu_day.json, {out}/gpu_day.md" + (f"; failed: {', '.join(failed)}" if failed else ""))
raise SystemExit(bool(failed))
PYTHON
