import fcntl
import os
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

min_version("9.27")

# The project's own source, never an installed copy; and the programs of the environment that runs Snakemake.
HERE = Path(workflow.basedir)
sys.path.insert(0, str(HERE / "src"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE / "src"), os.environ.get("PYTHONPATH")])
)
os.environ["PATH"] = os.pathsep.join(
    [os.path.dirname(sys.executable), os.environ["PATH"]]
)
# glibc hands freed blocks of megabytes back to the system at once, and torch asks for them again: a tenth of its time.
for _name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
    os.environ.setdefault(_name, str(2**29))
# Jobs that outlive this process discard what they made.
os.environ["ANOMED_PARENT"] = str(os.getpid())

from anomed.errors import AnomedError
from anomed.plan import MADE, TABLES, Plan, read

try:
    read(
        Path("params.yaml")
    )  # Snakemake's own reader passes over a key that stands twice
except AnomedError as error:
    raise WorkflowError(str(error)) from None


configfile: "params.yaml"


try:
    plan = Plan(config)
    plan.check()
except AnomedError as error:
    raise WorkflowError(str(error)) from None
if workflow.is_main_process:
    for lacking in dict.fromkeys(plan.lacking):
        print(f"warning: {lacking}", file=sys.stderr)

# Without its provenance records Snakemake sees no edit of a parameter or of code, and would keep stale results.
if workflow.is_main_process and not any(Path(".snakemake/metadata").glob("*")):
    # (Volumes carry their own: a job looks at what each was made from. See shard.py.)
    if made := [
        name
        for name in MADE
        if any(
            p.is_file() and not p.match("_spatial/*/*/*") for p in Path(name).rglob("*")
        )
    ]:
        raise WorkflowError(
            f"{', '.join(made)} exist, but .snakemake/metadata does not, so nobody can tell what they were made from. "
            "Run `dvc checkout` (or `dvc pull`) to bring it back, or delete these folders."
        )


onstart:
    # One Snakemake at a time. The kernel frees this lock when the process dies, so a run after `kill -9` just resumes.
    if workflow.is_main_process:
        if plan.lacking:
            sys.exit("Nothing was started: the warnings above say what is missing.")
        lock = open(".snakemake/anomed.lock", "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(
                "Another Snakemake is running in this folder; wait for it or stop it."
            )
        workflow.globals["anomed_lock"] = lock  # held until the process ends
        print(plan.terms(), file=sys.stderr, end="")
        plan.sweep()


def one_of(names):
    return "|".join(map(re.escape, names)) or r"(?!)"  # nothing


wildcard_constraints:
    domain=one_of(plan.domains),
    system=one_of(plan.systems),
    seed=r"\d+",


include: "workflow/rules/data.smk"
include: "workflow/rules/detect.smk"
include: "workflow/rules/score.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        expand("results/{name}", name=TABLES),
        "results/report.html",
        rules.table.input.cards,  # what the table was made from is part of the result: it is made again when missing
        rules.table.input.models,
        rules.table.input.runs,
        rules.table.input.scores,
