"""params.yaml: the models that every key is checked against before anything runs."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, StringConstraints, field_validator

from anomed import plugins, records
from anomed.detect import Detector
from anomed.errors import AnomedError
from anomed.preprocess.chain import Chain
from anomed.settings import Settings, check, nearest

NAME = r"[a-z0-9][a-z0-9_.@-]*"  # keys of blocks become file names and wildcards
Name = Annotated[str, StringConstraints(max_length=64, pattern=rf"^{NAME}$")]


class _Loader(yaml.SafeLoader):
    """Refuses what YAML forbids and PyYAML overlooks: a key that stands twice, of which the first would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key, _ in node.value:
            line, name = key.start_mark.line + 1, key.value if isinstance(key, yaml.ScalarNode) else None
            if name in lines and name != "<<":
                raise AnomedError(f"the key {name!r} stands twice, in lines {lines[name]} and {line}; keep one")
            lines[name] = line
        return super().construct_mapping(node, deep)


def read(path: Path) -> dict[str, Any]:
    """The content of a params file, not yet checked. Raises AnomedError naming the file when it is no YAML of keys."""
    try:
        value = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except FileNotFoundError:
        raise AnomedError(f"{path}: not found; run this in the project's folder or give --config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AnomedError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except AnomedError as error:
        raise AnomedError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise AnomedError(f"{path}: found {type(value).__name__}, expected keys and values")
    return value


def combined(paths: Sequence[Path]) -> dict[str, Any]:
    """A params file with overlays upon it, as `snakemake --configfile` lays them: keys replace keys, lists lists."""
    config = read(paths[0])
    for path in paths[1:]:
        lay(config, read(path))
    return config


def lay(config: Any, overlay: Mapping[str, Any]) -> None:
    """Put the keys of an overlay into `config`, which may be any mapping of mappings."""
    for key, value in overlay.items():
        if isinstance(value, Mapping) and isinstance(config.get(key), Mapping):
            lay(config[key], value)
        else:
            config[key] = value


def merge(overlay: Path, into: Path) -> None:
    """Write an overlay into a params file, whose comments stay. Raises AnomedError when the result is no valid one, and
    then writes nothing."""
    from ruamel.yaml import YAML

    Params(combined([into, overlay]))
    editor = YAML()
    editor.width, editor.preserve_quotes = 1000, True
    editor.indent(mapping=2, sequence=4, offset=2)
    config, over = (editor.load(path.read_text(encoding="utf-8")) for path in (into, overlay))
    lay(config, over)
    text = io.StringIO()
    editor.dump(config, text)
    records.write_text(into, text.getvalue())


class Run(Settings):
    """What to run: lists of keys of the blocks below, and the seeds."""

    domains: list[Name] = Field(min_length=1)
    systems: list[Name] = Field(min_length=1)
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(min_length=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"


class Domain(Settings):
    """The keys common to every block of `domains:`; the others are the options of its source."""

    source: str
    size: int = Field(default=224, ge=32, le=2048)
    root: str | None = None
    release: Literal["official"] | None = None
    preprocess: Name | None = None
    shards: int | None = Field(default=None, ge=1, le=10_000)
    train_domain: Name | None = None  # models come from there: an evaluation-only set, or another hospital's
    train_limit: int | None = Field(default=None, ge=1)  # train on that many normal subjects alone


# Keys of a domain that decide no image: a path is not content (the fingerprint of what lies there is, see plan.py).
_NOT_PREPARED = {"root", "shards", "preprocess", "train_domain", "train_limit"}


class Imported(Settings):
    """A system whose predictions were made elsewhere and brought by `anomed import`; it has no parameters here."""


class Method(Settings):
    """The keys common to every block of `methods:`; the others are the parameters of its implementation."""

    implementation: str


class Metrics(Settings):
    """How systems are scored."""

    aupro_limit: float = Field(default=0.3, gt=0, le=1)  # false positive rate up to which AUPRO integrates
    sensitivity_fpr: float = Field(default=0.05, gt=0, lt=1)  # false positive rate at which sensitivity is read
    replicates: int = Field(default=1000, ge=100, le=100_000)  # of the bootstrap behind intervals


class Top(Settings):
    """The top level of params.yaml."""

    run: Run
    domains: dict[Name, dict[str, Any] | None] = Field(default_factory=dict)
    methods: dict[Name, dict[str, Any] | None] = Field(default_factory=dict)
    imported: dict[Name, Imported | None] = Field(default_factory=dict)
    preprocess: dict[Name, dict[str, Any]] = Field(default_factory=dict)
    metrics: Metrics = Field(default_factory=Metrics)

    @field_validator("domains", "methods", "imported", "preprocess", "metrics", mode="before")
    @classmethod
    def _nothing_is_empty(cls, block: Any) -> Any:
        """A key of which every line is commented out."""
        return {} if block is None else block


class Params:
    """The checked params: canonical blocks with every default filled in, and the plug-in class of each.

    Raises AnomedError with one line per fault: key, what was found, and the nearest valid name.
    """

    def __init__(self, config: Mapping[str, Any]):
        top = check(Top, dict(config), "")
        self.run: Run = top.run
        self.metrics = top.metrics.model_dump()
        self.chains = {name: Chain(block, f"preprocess.{name}") for name, block in top.preprocess.items()}
        self.domains: dict[str, Domain] = {}
        self.domain_blocks: dict[str, dict[str, Any]] = {}
        self.methods: dict[str, type[Detector]] = {}
        self.method_blocks: dict[str, dict[str, Any]] = {}
        self.settings: dict[str, Settings] = {}  # of each method: its block as its class takes it
        for name, block in top.domains.items():
            self._add_domain(name, block or {})
        for name, block in top.methods.items():
            self._add_method(name, block or {})
        self.imported = list(top.imported)
        for name in self.imported:
            if name in self.methods:
                raise AnomedError(f"imported.{name}: `methods:` has a block of this name as well; rename one")
        _listed("run.domains", self.run.domains, "domains:", self.domains)
        _listed("run.systems", self.run.systems, "methods:` or `imported:", [*self.methods, *self.imported])
        _listed("run.seeds", self.run.seeds)
        for name in self.run.domains:
            self._check_train_domain(name)

    def _add_domain(self, name: str, block: dict[str, Any]) -> None:
        where = f"domains.{name}"
        common = {key: block[key] for key in Domain.model_fields if key in block}
        domain = check(Domain, common, where)
        source = _plugin("domains", domain.source, f"{where}.source")
        rest = {key: value for key, value in block.items() if key not in common}
        options = check(source.Options, rest, where, also=Domain.model_fields)
        if not domain.root if source.needs_root else domain.root is not None:
            found = "nothing" if domain.root is None else repr(domain.root)
            hint = "reads files: give their folder or zip" if source.needs_root else "reads no files: remove the key"
            raise AnomedError(f"{where}.root: found {found}, but source {domain.source!r} {hint}")
        self._check_chain(where, domain, source(name, options, None, Path()).volumetric)
        self.domains[name] = domain
        block = domain.model_dump(exclude=_NOT_PREPARED)
        if domain.preprocess:
            block["preprocess"] = self.chains[domain.preprocess].canonical()
        self.domain_blocks[name] = {**block, **options.model_dump()}

    def _check_chain(self, where: str, domain: Domain, volumetric: bool) -> None:
        """Volumes need a chain; images have none."""
        key, source = f"{where}.preprocess", domain.source
        if not volumetric:
            for name in ("preprocess", "shards"):
                if getattr(domain, name) is not None:
                    raise AnomedError(f"{where}.{name}: source {source!r} gives images, not volumes; remove the key")
        elif domain.preprocess is None:
            raise AnomedError(f"{key}: missing; source {source!r} gives volumes: name one of {_keys(self.chains)}")
        elif domain.preprocess not in self.chains:
            name = domain.preprocess
            raise AnomedError(f"{key}: {name!r} has no block under `preprocess:`{nearest(name, self.chains)}")

    def _check_train_domain(self, name: str) -> None:
        """Models of another domain can be used where that domain runs too, with images of the same side."""
        where, domain = f"domains.{name}.train_domain", self.domains[name]
        other = domain.train_domain
        if other is None:
            return
        if other == name or other not in self.run.domains:
            raise AnomedError(
                f"{where}: found {other!r}, expected another domain that `run.domains` lists, for its models"
            )
        if self.domains[other].train_domain is not None:
            raise AnomedError(f"{where}: {other!r} takes its models from elsewhere itself; name that domain")
        if self.domains[other].size != domain.size:
            sizes = f"{other} has {self.domains[other].size}, {name} {domain.size}"
            raise AnomedError(f"{where}: a model needs images of one size: {sizes}; set `size` to the same")
        if domain.train_limit is not None:
            raise AnomedError(f"domains.{name}.train_limit: the models are those of {other!r}; set the key there")

    def _add_method(self, name: str, block: dict[str, Any]) -> None:
        where = f"methods.{name}"
        implementation = block.get("implementation", name)
        check(Method, {"implementation": implementation}, where)
        method = _plugin("methods", implementation, f"{where}.implementation")
        rest = {key: value for key, value in block.items() if key != "implementation"}
        parameters = check(method.Params, rest, where, also=Method.model_fields)
        self.methods[name], self.settings[name] = method, parameters
        self.method_blocks[name] = {"implementation": implementation, **parameters.model_dump()}


def _keys(blocks: Mapping[str, Any]) -> str:
    return ", ".join(sorted(blocks)) or "the blocks of `preprocess:` (there is none)"


def _plugin(kind: str, name: str, where: str) -> Any:
    try:
        return plugins.load(kind, name)
    except AnomedError as error:
        raise AnomedError(f"{where}: {error}") from None


def _listed(key: str, values: list[Any], kind: str = "", blocks: Iterable[str] | None = None) -> None:
    """Every value of a list in `run:` stands there once, and has a block."""
    for value in values:
        if values.count(value) > 1:
            raise AnomedError(f"{key}: {value!r} stands there more than once")
        if blocks is not None and value not in blocks:
            raise AnomedError(f"{key}: {value!r} has no block under `{kind}`{nearest(value, blocks)}")
