"""Real photographs that ship inside scikit-learn and scikit-image, by name, with what they show and their licence."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class Photograph:
    """A file on disk; ``shows`` is one word of what a person sees in it."""

    name: str
    path: Path
    shows: str
    credit: str


_SKLEARN = "sklearn", "datasets/images"
_SKIMAGE = "skimage", "data"

_CATALOGUE = {
    "china.jpg": (_SKLEARN, "temple", "danielbuechele, CC BY 2.0, flickr.com/photos/danielbuechele/6061409035"),
    "flower.jpg": (_SKLEARN, "flower", "vultilion, CC BY 2.0, flickr.com/photos/vultilion/6056698931"),
    "astronaut.png": (_SKIMAGE, "person", "NASA, public domain"),
    "chelsea.png": (_SKIMAGE, "cat", "Stefan van der Walt, CC0"),
    "coffee.png": (_SKIMAGE, "cup", "Pikolo Espresso Bar, Rachel Michetti, CC0"),
    "rocket.jpg": (_SKIMAGE, "rocket", "SpaceX, CC0"),
    "motorcycle_left.png": (_SKIMAGE, "motorcycle", "Middlebury 2014 stereo benchmark, CC0"),
    "brick.png": (_SKIMAGE, "brick", "CC0Textures, CC0"),
    "grass.png": (_SKIMAGE, "grass", "Linolafett, CC0"),
    "gravel.png": (_SKIMAGE, "gravel", "CC0Textures, CC0"),
    "moon.png": (_SKIMAGE, "moon", "NASA, public domain"),
}


def photograph(name: str) -> Photograph:
    """One photograph of the catalogue."""
    (package, folder), shows, credit = _CATALOGUE[name]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{name} comes with scikit-learn or scikit-image: install the extra, vlora-sgl[dev]")
    return Photograph(name, Path(spec.origin).parent / folder / name, shows, credit)


def all_photographs() -> list[Photograph]:
    """The whole catalogue."""
    return [photograph(name) for name in _CATALOGUE]
