"""The command line: parse, call, print. The work is elsewhere, imported when its command runs."""

import argparse
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anomed.errors import AnomedError

# Sums of floats depend on the number of threads: libraries get one, and torch what the method's parameters say.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic matrix products on CUDA


def _images(args: argparse.Namespace) -> None:
    from anomed.prepare import prepare

    prepare(args.domain, args.params, args.root, args.work, args.out, args.problems)


def _spatial(args: argparse.Namespace) -> None:
    from anomed.preprocess.shard import spatial

    spatial(args.domain, args.params, args.files, args.root, args.work, args.out, args.shard, args.problems)


def _intensity(args: argparse.Namespace) -> None:
    from anomed.preprocess.slicing import intensity

    intensity(args.domain, args.params, args.root, args.work, args.volumes, args.out, args.problems)


def _volume(args: argparse.Namespace) -> None:
    from anomed.preprocess.single import volume

    volume(args.image, args.out, args.steps, args.lesion, args.organ)


def _fit(args: argparse.Namespace) -> None:
    from anomed.detect import fit

    fit(args.system, args.params, args.seed, args.data, args.out, args.device, args.checkpoint, args.checkpoint_seconds)


def _predict(args: argparse.Namespace) -> None:
    from anomed.predict import predict

    predict(args.model, args.data, args.out, args.device, args.train)


def _import(args: argparse.Namespace) -> None:
    from anomed.importing import IMPORTED, Given, bring

    data = args.data or Path("data/prepared") / args.domain
    given = Given(args.scores, args.maps, args.answers)
    out = bring(args.system, args.domain, args.seed, given, args.origin, data, IMPORTED)
    row = f"a block `imported: {{{args.system}: }}`, and {args.system!r} in run.systems"
    print(f"{out}\nFor its row in the table, in params.yaml: {row}")


def _adopt(args: argparse.Namespace) -> None:
    from anomed.importing import IMPORTED, adopt

    adopt(args.system, args.seed, args.params, args.data, args.out, IMPORTED)


def _score(args: argparse.Namespace) -> None:
    from anomed.scoring import score

    score(args.run, args.data, args.params, args.out, args.device)


def _table(args: argparse.Namespace) -> None:
    from anomed.report.table import build

    build(args.plan, args.prepared, args.scores, args.runs, args.models, args.out)


def _report(args: argparse.Namespace) -> None:
    from anomed.report.html import build

    build(args.plan, args.prepared, args.runs, args.models, args.results, args.out)


def _compare(args: argparse.Namespace) -> None:
    from anomed.compare import compare

    try:
        code = compare(args.first, args.second, args.scores, args.baseline or args.scores, args.tolerance)
    except (AnomedError, OSError) as error:  # 1 means a regression
        print(f"anomed: error: {error}", file=sys.stderr)
        code = 2
    sys.exit(code)


def _doctor(args: argparse.Namespace) -> None:
    if args.what == "data":
        from anomed.doctor_data import doctor_data as examine
    else:
        from anomed.doctor import doctor as examine
    sys.exit(1 if examine(*args.config) else 0)


def _fetch(args: argparse.Namespace) -> None:
    from anomed.fetch import fetch

    fetch(args.what, args.to, *args.config)


def _merge(args: argparse.Namespace) -> None:
    from anomed.params import merge

    merge(args.overlay, args.into)
    print(f"{args.into}: now with what {args.overlay} says")


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"found {type(value).__name__}, expected a JSON object")
    return value


def _paths(text: str) -> dict[str, Path]:
    value = _json(text)
    for name, path in value.items():
        if not isinstance(path, str):
            raise argparse.ArgumentTypeError(f"{name}: found {path!r}, expected a path")
    return {name: Path(path) for name, path in value.items()}


def _shard(text: str) -> tuple[int, int]:
    index, _, number = text.partition("-of-")
    if not (index.isdecimal() and number.isdecimal() and int(index) < int(number)):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected <i>-of-<n> with i from 0 to n - 1, as in 0-of-4")
    return int(index), int(number)


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected an integer from 0 to {2**32 - 1}")
    return int(text)


def _key(text: str) -> str:
    from anomed.params import NAME

    if not re.fullmatch(NAME, text) or len(text) > 64:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected lower-case letters, digits and . _ @ -")
    return text


def _below(limit: float, expected: str) -> Callable[[str], float]:
    """The reader of a number from 0 to below `limit`."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = -1
        if not 0 <= value < limit:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected}")
        return value

    return number


_tolerance = _below(1, "a fraction from 0 to below 1")
_seconds = _below(1e9, "seconds, 0 or more")


def _path(text: str) -> Path | None:
    """A path; empty text means none, so that a rule can pass a root that a domain does not need."""
    return Path(text) if text else None


def parser() -> argparse.ArgumentParser:
    """The parser of `anomed`; each command's handler is in `handler`."""
    top = argparse.ArgumentParser(
        prog="anomed", description="One table for medical anomaly detection.", allow_abbrev=False
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(handler: Any, summary: str, group: Any = commands) -> argparse.ArgumentParser:
        name = handler.__name__.removeprefix("_")
        sub = group.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        sub.set_defaults(handler=handler)
        return sub

    def folder(sub: argparse.ArgumentParser, flag: str, meaning: str, **options: Any) -> None:
        sub.add_argument(flag, type=Path, metavar="DIR", help=meaning, required="default" not in options, **options)

    device: dict[str, Any] = {
        "choices": ["auto", "cpu", "cuda"],
        "default": "auto",
        "help": "auto: CUDA if the job sees it",
    }

    text = "turn raw data into a prepared domain, or one volume into a preprocessed one"
    parts = commands.add_parser("prepare", help=text, description=text, allow_abbrev=False)
    kinds = parts.add_subparsers(required=True, metavar="WHAT")
    for handler, text in (
        (_images, "a domain whose source gives images"),
        (_spatial, "one shard of a domain whose source gives volumes: mask, register; one folder a volume"),
        (_intensity, "grey levels and slices of what `spatial` left: the prepared domain"),
    ):
        sub = command(handler, text, kinds)
        sub.add_argument("domain", help="its key in params.yaml")
        if handler is _spatial:
            sub.add_argument("shard", type=_shard, help="for example 0-of-4")
            sub.add_argument(
                "--files", type=_paths, required=True, metavar="JSON", help="files that the chain reads, by name"
            )
        sub.add_argument(
            "--params", type=_json, required=True, metavar="JSON", help="the domain's block, defaults filled in"
        )
        sub.add_argument(
            "--root", type=_path, metavar="PATH", help="folder or zip of the raw data, for sources that read one"
        )
        folder(sub, "--work", "scratch folder", default=Path("work"))
        if handler is _intensity:
            folder(sub, "--volumes", "what `spatial` wrote")
        folder(sub, "--out", "folder to write")
        sub.add_argument(
            "--problems", type=Path, required=True, metavar="CSV", help="where problems are listed, if any"
        )
    sub = command(_volume, "one volume through any steps of a chain", kinds)
    sub.add_argument("image", type=Path, help="NIfTI, NRRD or MetaImage file, or the folder of a DICOM series")
    sub.add_argument("out", type=Path, help=".nii.gz to write; lesion, organ and transform go beside it")
    sub.add_argument(
        "--steps", required=True, metavar="LIST", help="for example 'skull_strip, register: {spacing: 2}, z_score'"
    )
    sub.add_argument("--lesion", type=Path, metavar="PATH", help="a mask of the lesions, moved along")
    sub.add_argument("--organ", type=Path, metavar="PATH", help="a mask of the brain or organ")

    sub = command(_fit, "train a method on a domain's normal images")
    sub.add_argument("system", help="the row's name in the table")
    sub.add_argument("--params", type=_json, required=True, metavar="JSON", help='{"method": block, "files": hashes}')
    sub.add_argument("--seed", type=_seed, required=True)
    folder(sub, "--data", "prepared domain")
    folder(sub, "--out", "model to write")
    sub.add_argument("--device", **device)
    sub.add_argument("--checkpoint", type=_path, metavar="FILE", help="where a training that is killed can go on from")
    sub.add_argument("--checkpoint-seconds", type=_seconds, default=60.0, metavar="S", help="time between two (60)")

    sub = command(_predict, "score a domain's valid and test images with a model")
    folder(sub, "--model", "what fit wrote")
    folder(sub, "--data", "prepared domain")
    sub.add_argument("--train", type=_path, metavar="DIR", help="prepared domain of the model, where it is another one")
    folder(sub, "--out", "predictions to write")
    sub.add_argument("--device", **device)

    sub = command(_import, "check the predictions of an outside method and keep them for the table, one seed a call")
    sub.add_argument("system", type=_key, help="the row's name in the table")
    sub.add_argument("--domain", type=_key, required=True, help="its key in params.yaml")
    sub.add_argument("--seed", type=_seed, required=True, metavar="K", help="of the run; 0 where nothing is random")
    text = "columns image_id and score, every valid and test image"
    sub.add_argument("--scores", type=Path, metavar="CSV", help=text)
    text = "<image_id>.npy for each of them, float32 h x w, one shape; leave it out if the method does not localise"
    sub.add_argument("--maps", type=Path, metavar="DIR", help=text)
    text = "in place of both: boxes, captions and diagnoses of a vision-language model, one JSON object a line"
    sub.add_argument("--answers", type=Path, metavar="JSONL", help=text)
    text = "where they come from: program, version, who ran it"
    sub.add_argument("--origin", required=True, metavar="TEXT", help=text)
    folder(sub, "--data", "prepared domain (default: data/prepared/<domain>)", default=None)

    sub = command(_adopt, "turn imported predictions into a run")
    sub.add_argument("system", help="the row's name in the table")
    sub.add_argument("--params", type=_json, required=True, metavar="JSON", help="hashes of what was imported")
    sub.add_argument("--seed", type=_seed, required=True)
    folder(sub, "--data", "prepared domain")
    folder(sub, "--out", "predictions to write")

    sub = command(_score, "compute every metric of one run")
    folder(sub, "--run", "what predict wrote")
    folder(sub, "--data", "prepared domain")
    sub.add_argument("--params", type=_json, required=True, metavar="JSON", help="method, files and metrics blocks")
    sub.add_argument("--out", type=Path, required=True, metavar="JSON", help="score file to write; curves go beside it")
    sub.add_argument("--device", **device)

    for handler, summary in (
        (_table, "collect all scores into the tables"),
        (_report, "draw the page of a finished table"),
    ):
        sub = command(handler, summary)
        sub.add_argument("--plan", type=_json, required=True, metavar="JSON", help="domains, systems, seeds and hashes")
        folder(sub, "--prepared", "all prepared domains", default=Path("data/prepared"))
        folder(sub, "--runs", "all predictions", default=Path("runs"))
        folder(sub, "--models", "all models", default=Path("models"))
        if handler is _table:
            folder(sub, "--scores", "all score files", default=Path("scores"))
            folder(sub, "--out", "folder of the tables", default=Path("results"))
        else:
            folder(sub, "--results", "folder of the tables", default=Path("results"))
            sub.add_argument("--out", type=Path, default=Path("results/report.html"), metavar="HTML")

    sub = command(
        _compare,
        "say on which domains and metrics system B differs from A; exit 1 if it is worse beyond doubt, 2 on a fault",
    )
    sub.add_argument("first", metavar="A", help="a system")
    sub.add_argument("second", metavar="B", help="the system to judge by it; may be A itself with --baseline")
    folder(sub, "--scores", "score files of B", default=Path("scores"))
    sub.add_argument("--baseline", type=Path, metavar="DIR", help="score files of A, where they lie elsewhere")
    text = "how much worse B may be (a fraction), and its whole interval must be worse (default: 0)"
    sub.add_argument("--tolerance", type=_tolerance, default=0.0, metavar="X", help=text)

    text = "params.yaml and overlays of it"
    parts = commands.add_parser("params", help=text, description=text, allow_abbrev=False)
    kinds = parts.add_subparsers(required=True, metavar="WHAT")
    sub = command(_merge, "write an overlay such as params/paper.yaml into params.yaml; comments stay", kinds)
    sub.add_argument("overlay", type=Path, metavar="YAML")
    sub.add_argument("--into", type=Path, default=Path("params.yaml"), metavar="YAML")

    config: dict[str, Any] = {
        "type": Path,
        "nargs": "+",
        "default": [Path("params.yaml")],
        "metavar": "YAML",
        "help": "params.yaml, and overlays such as params/paper.yaml after it",
    }
    sub = command(_doctor, "say what is installed, which device is used, which data and weights are present")
    sub.add_argument("what", nargs="?", choices=["data"], help="data: what each domain has and lacks, by name")
    sub.add_argument("--config", **config)

    sub = command(_fetch, "download a domain's published files or the systems' weights: resumed, checked by sha256")
    sub.add_argument("what", metavar="WHAT", help="a domain with a card, or `weights`")
    sub.add_argument("--to", type=Path, metavar="DIR", help="default: data/raw/<source> or data/weights")
    sub.add_argument("--config", **config)
    return top


def main(argv: list[str] | None = None) -> None:
    """Run one command. A fault of the input is one message on standard error and exit code 1; a command that is
    interrupted (130) or terminated (143) removes what it has half-written."""
    args = parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        args.handler(args)
    except KeyboardInterrupt:
        print("anomed: interrupted", file=sys.stderr)
        sys.exit(130)
    except AnomedError as error:
        sys.exit(f"anomed: error: {error}")
    except OSError as error:
        if error.filename is None:
            raise
        sys.exit(f"anomed: error: {error.filename}: {(error.strerror or '').lower()}")


if __name__ == "__main__":
    main()
