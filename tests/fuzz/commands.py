"""Command lines with a mistake: the expected outcome is one message on stderr that names it, and exit status 2."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import yaml
from hypothesis import strategies as st

from tests.fuzz._run import checkpoint, command, config, folder
from tests.fuzz._target import Finding, Target, Verdict

_MOST = 800  # characters of a message
_FILES = ("absent", "folder", "empty", "text", "binary", "latin", "broken", "list", "number", "cut")
_TEXTS = st.sampled_from(
    ["", "x", "-1", "0", "1e400", "nan", "99999999999999999999", "[", "{}", "ü", "a b", "--", "None"]
)
_VALUES = st.one_of(
    st.sampled_from([None, True, -1, 0, 1e308, float("nan"), 2**70, "", "x", [], {}, [1, "a"], {"a": 1}]),
    st.sampled_from(["os.path", "torch.nn.Linear", "lieattn.groups.Absent", "absent.Class", "lieattn_datasets.Digits"]),
)
_OPTIONS = {
    "certify": (
        "--clouds",
        "--elements",
        "--seed",
        "--dtype",
        "--tolerance",
        "--input",
        "--output",
        "--data",
        "--json",
    ),
    "test": ("--data.batch_size", "--trainer.devices", "--trainer.accelerator", "--seed_everything", "--trust"),
    "predict": ("--data.eval_batch_size", "--trainer.precision", "--data.workers", "--ckpt_path"),
    "fit": ("--data.batch_size", "--trainer.max_epochs", "--trainer.devices", "--seed_everything", "--ckpt_path"),
    "compare": ("--jobs", "--models", "--budget.steps", "--json"),
    "bench": ("--repeats", "--json"),
    "info": (),
}


@st.composite
def _cases(draw: st.DrawFn):
    name = draw(st.sampled_from([*_OPTIONS, "fit", "certify", "fit"]))
    kind = draw(st.sampled_from(["file", "option", "unknown", "setting", "setting"]))
    if kind == "setting" and name != "fit":
        kind = "file"
    match kind:
        case "file":
            return name, kind, draw(st.sampled_from(_FILES))
        case "option" if _OPTIONS[name]:
            return name, kind, (draw(st.sampled_from(_OPTIONS[name])), draw(_TEXTS))
        case "setting":
            return name, kind, (draw(st.integers(0, 2**31 - 1)), draw(_VALUES))
    return name, "unknown", draw(st.sampled_from(["--absent", "--absent=1", "stray", "-q", "--trainer.absent=1"]))


def _check(case) -> Finding | Verdict:
    name, kind, what = case
    status, _, errors = command(*_line(name, kind, what))
    told = errors.strip().rpartition("\nlieattn ")[2] if "\nlieattn " in errors else errors.strip()
    if status == 0:  # the command line is valid after all, such as a batch that is larger than the data
        return Verdict.CORRECT
    if status != 2:
        return Finding(Verdict.SILENT, f"exit status {status} of {case}: {told[-300:]}")
    if (
        "traceback" in errors.casefold()
        or not told
        or len(told) > _MOST
        or not any(word in told for word in _words(name, kind, what))
    ):
        return Finding(Verdict.UNNAMED, f"{case}: {told[:300]}")
    return Verdict.NAMED


def _words(name: str, kind: str, what) -> list[str]:
    """Return words of which a message must contain one: the file, the option or the file that it names, the setting."""
    if name == "bench":  # its name of a benchmark is invalid, so that no benchmark runs
        return ["benchmark"]
    match kind:
        case "file":
            return [f"{what}.file"]
        case "option":
            file = Path(what[1])
            return [what[0].rpartition(".")[2].strip("-"), f"{file} cannot be read", f"there is no checkpoint {file}"]
        case "setting":
            holders = list(_holders(config(folder())))
            _, key, section = holders[what[0] * len(holders) // 2**31]
            return [section if key in ("class_path", "init_args") else key]
    return [what.partition("=")[0].lstrip("-").removeprefix("trainer.")]


def _line(name: str, kind: str, what) -> list[str]:
    """Return a command line that is valid except for the mistake."""
    trained, place = str(checkpoint()), folder() / "mistakes"
    place.mkdir(exist_ok=True)
    content = copy.deepcopy(config(place))
    if kind == "setting":
        holders = list(_holders(content))
        holder, key, _ = holders[what[0] * len(holders) // 2**31]
        holder[key] = what[1]
    file = place / "run.yaml"
    file.write_text(yaml.safe_dump(content))
    comparison = place / "comparison.yaml"
    comparison.write_text(yaml.safe_dump(_comparison(config(place))))
    given = _file(place, what) if kind == "file" else None
    quiet = ["--trainer.default_root_dir", str(place), "--trainer.logger", "false"]
    quiet += ["--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
    lines = {
        "certify": ["certify", given or trained, "--clouds", "1", "--dtype", "float64"],
        "test": ["test", "--ckpt_path", given or trained, *quiet],
        "predict": ["predict", "--ckpt_path", given or trained, *quiet],
        "fit": ["fit", "--config", given or str(file)],
        "compare": ["compare", "--plan", "--out", str(place), "--config", given or str(comparison)],
        "bench": ["bench", given or "absent"],
        "info": ["info", *([given] if given else [])],
    }
    mistake = {"option": [*what], "unknown": [what]} if kind in ("option", "unknown") else {}
    return [*lines[name], *mistake.get(kind, [])]


def _comparison(run: dict) -> dict:
    """Return settings for a comparison with the network of a run."""
    task = run["model"]
    arguments = {key: value for key, value in task["init_args"].items() if key in ("classes", "labels")}
    return {
        "task": {"class_path": task["class_path"], "init_args": arguments},
        "models": {"one": task["init_args"]["network"]},
        "data": {name: run["data"][name] for name in ("train", "val", "test")},
        "budget": {"steps": 1},
    }


def _holders(value, section=""):
    """Yield the places of all settings as (container, key, name of the container)."""
    for key, item in list(value.items()):
        yield value, key, section
        if isinstance(item, dict):
            yield from _holders(item, section if key == "init_args" else key)


def _file(place: Path, kind: str) -> str:
    """Write a file that is not valid for any command, and return its path."""
    path = place / f"{kind}.file"
    whole = checkpoint().read_bytes()
    contents = {
        "empty": b"",
        "text": b"these are no weights",
        "binary": os.urandom(200),
        "latin": b"model: \xff\xfe",
        "broken": b"model: [1, 2\nx: {",
        "list": b"- 1\n- 2\n",
        "number": b"1",
        "cut": whole[: len(whole) // 2],
    }
    if kind == "folder":
        path.mkdir(exist_ok=True)
    elif kind in contents:
        path.write_bytes(contents[kind])
    return str(path)


TARGETS = {"commands": Target("command lines", _cases(), _check, long=300, quick=8)}
