"""params.yaml: the models that every key is checked against before anything runs."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, StringConstraints, ValidationError

from anomed import plugins
from anomed.detect import Detector
from anomed.errors import AnomedError
from anomed.plugins import Settings

# Keys of blocks become file names and wildcards.
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.@-]*$")]


class Run(Settings):
    """What to run: lists of keys of the blocks below, and the seeds."""

    domains: list[Name] = Field(min_length=1)
    systems: list[Name] = Field(min_length=1)
    seeds: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"


class Domain(Settings):
    """The keys common to every block of `domains:`; the others are the options of its source."""

    source: str
    size: int = Field(default=224, ge=32, le=2048)
    root: str | None = None
    release: Literal["official"] | None = None


class Method(Settings):
    """The keys common to every block of `methods:`; the others are the parameters of its implementation."""

    implementation: str


class Metrics(Settings):
    """How systems are scored."""

    aupro_limit: float = Field(default=0.3, gt=0, le=1)  # false positive rate up to which AUPRO integrates


class Top(Settings):
    """The top level of params.yaml."""

    run: Run
    domains: dict[Name, dict[str, Any] | None] = Field(default_factory=dict)
    methods: dict[Name, dict[str, Any] | None] = Field(default_factory=dict)
    metrics: Metrics = Field(default_factory=Metrics)


class Params:
    """The checked params: canonical blocks with every default filled in, and the plug-in class of each.

    Raises AnomedError with one line per fault: key, what was found, and the nearest valid name.
    """

    def __init__(self, config: Mapping[str, Any]):
        top = _check(Top, dict(config), "")
        self.run: Run = top.run
        self.metrics = top.metrics.model_dump()
        self.domains: dict[str, Domain] = {}
        self.domain_blocks: dict[str, dict[str, Any]] = {}
        self.methods: dict[str, type[Detector]] = {}
        self.method_blocks: dict[str, dict[str, Any]] = {}
        for name, block in top.domains.items():
            self._add_domain(name, block or {})
        for name, block in top.methods.items():
            self._add_method(name, block or {})
        _listed("run.domains", self.run.domains, "domains", self.domains)
        _listed("run.systems", self.run.systems, "methods", self.methods)
        _listed("run.seeds", self.run.seeds)

    def _add_domain(self, name: str, block: dict[str, Any]) -> None:
        where = f"domains.{name}"
        common = {key: block[key] for key in Domain.model_fields if key in block}
        domain = _check(Domain, common, where)
        source = _plugin("domains", domain.source, f"{where}.source")
        rest = {key: value for key, value in block.items() if key not in common}
        options = _check(source.Options, rest, where, also=Domain.model_fields)
        if source.needs_root and not domain.root:
            raise AnomedError(
                f"{where}.root: not set, but source {domain.source!r} reads files; give their folder or zip"
            )
        self.domains[name] = domain
        # a path is not content: `root` enters no hash, the fingerprint of what lies there does (plan.py)
        self.domain_blocks[name] = {**domain.model_dump(exclude={"root"}), **options.model_dump()}

    def _add_method(self, name: str, block: dict[str, Any]) -> None:
        where = f"methods.{name}"
        implementation = block.get("implementation", name)
        _check(Method, {"implementation": implementation}, where)
        method = _plugin("methods", implementation, f"{where}.implementation")
        rest = {key: value for key, value in block.items() if key != "implementation"}
        parameters = _check(method.Params, rest, where, also=Method.model_fields)
        self.methods[name] = method
        self.method_blocks[name] = {"implementation": implementation, **parameters.model_dump()}


def _plugin(kind: str, name: str, where: str) -> Any:
    try:
        return plugins.load(kind, name)
    except AnomedError as error:
        raise AnomedError(f"{where}: {error}") from None


def _listed(key: str, values: list[Any], kind: str = "", blocks: Mapping[str, Any] | None = None) -> None:
    """Every value of a list in `run:` stands there once, and has a block."""
    for value in values:
        if values.count(value) > 1:
            raise AnomedError(f"{key}: {value!r} stands there more than once")
        if blocks is not None and value not in blocks:
            raise AnomedError(f"{key}: {value!r} has no block under `{kind}:`{_nearest(value, blocks)}")


def _nearest(name: str, known: Any) -> str:
    near = difflib.get_close_matches(str(name), [str(key) for key in known], n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(map(str, known))) or 'none'}"


def _check(model: type[BaseModel], values: Any, where: str, also: Any = ()) -> Any:
    """`values` as an instance of `model`, or AnomedError with one line per fault. `also`: further keys to suggest."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = []
        for fault in error.errors():
            key = ".".join(str(part) for part in ((where,) if where else ()) + fault["loc"])
            if fault["type"] == "extra_forbidden":
                fields = _fields(model, fault["loc"][:-1])
                lines.append(f"{key}: unknown key{_nearest(str(fault['loc'][-1]), [*fields, *also])}")
            elif fault["type"] == "missing":
                lines.append(f"{key}: missing")
            else:
                lines.append(f"{key}: {fault['msg'].lower()}, found {fault['input']!r}")
        raise AnomedError("\n".join(lines)) from None


def _fields(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Names of the fields of the model that `path` leads to."""
    for part in path:
        inner = model.model_fields[str(part)].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return []
        model = inner
    return list(model.model_fields)
