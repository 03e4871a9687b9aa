"""What is written beside the embedded NOVA's images: diagnoses, captions, clinical histories."""

import numpy as np

SEQUENCES = ("FLAIR", "T1-weighted", "T2-weighted", "contrast-enhanced T1-weighted")

# What may be found, by the kind of lesion: real and rare diagnoses that can look like it. One a case.
DIAGNOSES = {
    "tumour": (
        "Gliosarcoma", "Pleomorphic xanthoastrocytoma", "Astroblastoma", "Supratentorial ependymoma",
        "Primary central nervous system lymphoma", "Anaplastic ganglioglioma", "Atypical teratoid/rhabdoid tumour",
        "Tumefactive demyelination", "Embryonal tumour with multilayered rosettes",
    ),
    "infarct": (
        "Porencephalic cyst", "Neuroglial cyst", "Dyke-Davidoff-Masson syndrome", "Moyamoya disease",
        "Perinatal arterial ischaemic stroke", "Sneddon syndrome", "Cerebral hydatid cyst", "Fibromuscular dysplasia",
        "Takayasu arteritis",
    ),
    "mass": (
        "Intracranial solitary fibrous tumour", "Meningeal Rosai-Dorfman disease", "Chordoid meningioma",
        "Dural marginal zone lymphoma", "Rhabdoid meningioma", "Meningeal IgG4-related disease",
        "Secretory meningioma", "Intracranial plasmacytoma", "Mesenchymal chondrosarcoma of the dura",
    ),
    "small": (
        "Susac syndrome", "Cerebral autosomal dominant arteriopathy (CADASIL)", "Neurocysticercosis", "Fabry disease",
        "Primary angiitis of the central nervous system", "Cerebral fat embolism", "Neurosarcoidosis",
        "Miliary tuberculosis of the brain", "Intravascular lymphoma",
    ),
}  # fmt: skip
KIND = {diagnosis: kind for kind, names in DIAGNOSES.items() for diagnosis in names}
_FINDINGS = {  # in the order of SEQUENCES
    "tumour": (
        "a heterogeneous hyperintense lesion with surrounding oedema",
        "an ill-defined hypointense lesion with mass effect",
        "a heterogeneous hyperintense mass with perifocal oedema",
        "an irregularly enhancing lesion with hypointense oedema around it",
    ),
    "infarct": (
        "a cavity isointense to cerebrospinal fluid with a hyperintense gliotic rim",
        "a sharply marginated hypointense cavity",
        "a sharply marginated hyperintense cavity",
        "a hypointense cavity without enhancement",
    ),
    "mass": (
        "a well-defined, slightly hyperintense mass bordered by a thin cleft of fluid",
        "a nearly isointense rounded mass that displaces the adjacent gyri",
        "a rounded mass bordered by a thin hyperintense cleft of fluid",
        "a homogeneously enhancing, well-defined mass",
    ),
    "small": (
        "scattered small foci, most of them hyperintense,",
        "scattered small hypointense foci",
        "scattered small hyperintense foci",
        "scattered small foci, some of them enhancing,",
    ),
}
_CAPTIONS = (
    "{plane} {sequence} image: {finding} in the {place}.",
    "{plane} {sequence} MRI of the brain, showing {finding} in the {place}.",
    "{plane} {sequence} image demonstrates {finding}, located in the {place}.",
)
_COMPLAINTS = {
    "tumour": ("a first generalised seizure", "headache and vomiting for three weeks", "word-finding difficulty"),
    "infarct": ("focal epilepsy for many years", "a chronic weakness of one arm", "migraine-like headache"),
    "mass": ("slowly increasing headache", "a change of personality noticed by the family", "an unsteady gait"),
    "small": ("confusion for ten days", "episodes of headache and blurred vision", "memory complaints"),
}
_EXAMINATIONS = (
    "Neurological examination was unremarkable.",
    "Blood tests were normal.",
    "There was no relevant medical history.",
    "A CT of the head had been inconclusive.",
)


def caption(kind: str, plane: str, sequence: str, place: str, rng: np.random.Generator) -> str:
    """A sentence as a radiologist puts it below a figure: plane, sequence, finding and its place."""
    finding = _FINDINGS[kind][SEQUENCES.index(sequence)]
    words = {"plane": plane.capitalize(), "sequence": sequence, "finding": finding, "place": place}
    return str(rng.choice(_CAPTIONS)).format(**words).replace(",,", ",")


def history(kind: str, rng: np.random.Generator) -> str:
    """Age, sex, complaint and one more fact; nothing of it tells the diagnosis."""
    age, sex = int(rng.integers(19, 79)), rng.choice(["man", "woman"])
    return f"A {age}-year-old {sex} presented with {rng.choice(_COMPLAINTS[kind])}. {rng.choice(_EXAMINATIONS)}"
