"""Your own images, with one folder for each class."""

import warnings
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lieattn._core.checks import check_arguments
from lieattn._core.messages import needs_extra
from lieattn_datasets._checks import require
from lieattn_datasets._clouds import Card, Transform
from lieattn_datasets._files import files_below, listed
from lieattn_datasets._images import ImagePoints
from lieattn_datasets._splits import FOLDERS, SplitOrAll, progress, seeded, split_folders

_SUFFIXES = (".png", ".apng", ".jpg", ".jpeg")
_SHOWN = 200  # characters of a problem in a message


class ImageFolder(ImagePoints):
    """Labeled PNG and JPEG images of a folder whose subfolders are the classes.

    The folder contains ``CLASS/*``, which a permutation splits with the same share of every class; or it contains
    ``train/CLASS/*``, ``val/CLASS/*`` (or ``valid``) and ``test/CLASS/*``, or ``CLASS/train/*`` and so on. Items are as
    in :class:`ImagePoints`.
    Images are rotated according to their EXIF data, transparency is ignored, and the first image of an animation is
    read. If a gray image of the split has 16 bits, all are kept with 16 bits; Pillow reads those in color, or with an
    alpha channel, with 8.

    Parameters
    ----------
    root
        The folder. Hidden files and folders are ignored. Links to files and folders are followed.
    split
        ``"train"``, ``"valid"``, ``"test"`` or ``"all"``.
    size
        Size to which all images are resized bilinearly: a number of pixels, or (height, width). Default: images are
        not resized and must all have the same size.
    color
        Whether items have three channels (red, green and blue) or one (the luminance).
    shares
        Shares of ``"train"`` and ``"valid"`` if the folder has no splits. The rest is ``"test"``.
    split_seed
        Seed of the permutation. Use the same for all splits.
    transform
        As for :class:`ImagePoints`.

    Attributes
    ----------
    classes : tuple[str, ...]
        Names of the classes: the subfolders with images, in alphabetical order.

    Raises
    ------
    FileNotFoundError
        If the folder does not exist, or has no images.
    ValueError
        If there are other files, if images are damaged or have more pixels than Pillow allows (the message names them),
        if images have several sizes and ``size`` is None, or if an argument is out of range.
    """

    card = Card("your own images", "those of your files", "all PNG and JPEG images in the folder")

    def __init__(
        self,
        root: str | Path,
        split: SplitOrAll = "train",
        *,
        size: int | Sequence[int] | NDArray[Any] | None = None,
        color: bool = False,
        shares: Sequence[float] = (0.8, 0.1),
        split_seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        check_arguments(ImageFolder.__init__, locals())
        sides = None if size is None else tuple(size) if isinstance(size, Sequence | np.ndarray) else (size, size)
        right = sides is None or (len(sides) == 2 and min(sides) >= 1)
        require(right, "size", "one or two numbers of pixels of at least 1", repr(size))
        paths, labels, classes = _choose(Path(root), split, shares, split_seed)
        images = _read_all(paths, color, sides)
        super().__init__(images, labels, num_classes=len(classes), channels=3 if color else 1, transform=transform)
        self.classes = classes
        self._files = [str(path) for path in paths]


def _choose(
    root: Path, split: str, shares: Sequence[float], seed: int
) -> tuple[list[Path], NDArray[np.int64], tuple[str, ...]]:
    """Return the files of a split, the class of each, and the names of all classes."""
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {str(root)!r} of images")
    paths = {PurePosixPath(name): path for name, path in files_below(root).items()}
    files = sorted(paths)
    tops = {path.parts[0].lower() for path in files}
    splits = split_folders(files)
    given = bool(splits) or ("train" in tops and tops <= FOLDERS.keys())
    place = "SPLIT/CLASS/*" if given else "CLASS/*"
    depth = 3 if given else 2
    wrong = {path for path in files if len(path.parts) != depth or (given and path not in splits)}
    other = [str(path) for path in files if path in wrong or path.suffix.lower() not in _SUFFIXES]
    if other:
        raise ValueError(f"{root}: expected only files {place} ({', '.join(_SUFFIXES)}), got {listed(other)}")
    names = [splits[path][0].parts[0] if splits else path.parts[0] for path in files]
    classes = tuple(sorted({*names}))
    labels = np.array([classes.index(name) for name in names], dtype=np.int64)
    if given and split != "all":
        chosen = np.flatnonzero([splits[path][1] == split for path in files])
    else:
        chosen = seeded(labels, split, shares, seed) if files else np.arange(0)
    if not len(chosen):
        raise FileNotFoundError(f"there are no images {place} ({', '.join(_SUFFIXES)}) of {split} in {str(root)!r}")
    return [paths[files[index]] for index in chosen], labels[chosen], classes


def _read_all(paths: Sequence[Path], color: bool, sides: tuple[int, ...] | None) -> NDArray[Any]:
    """Return images ``[images, height, width]``, with three channels if ``color``; errors name all broken images."""
    images, broken, names = [], [], dict[tuple[int, ...], str]()
    for path in progress(paths, "reading images", len(paths)):
        try:
            images.append(_read(path, color, sides))
            names.setdefault(images[-1].shape[:2], f"{images[-1].shape[0]} x {images[-1].shape[1]} ({path})")
        except ImportError:
            raise
        except Exception as error:  # a damaged file can fail in any way
            broken.append(f"{path}: {type(error).__name__}: {str(error)[:_SHOWN]}")
    if broken:
        raise ValueError(f"{len(broken)} of {len(paths)} images cannot be used: {listed(broken, '; ')}")
    require(len(names) < 2, "images", "images of one size, or the argument size", listed(list(names.values())))
    if len({image.dtype for image in images}) > 1:
        images = [image * np.uint16(257) if image.dtype == np.uint8 else image for image in images]
    return np.stack(images)


def _read(path: Path, color: bool, sides: tuple[int, ...] | None) -> NDArray[Any]:
    """Return an image ``[height, width]`` or, if ``color``, ``[height, width, 3]``, uint8 or uint16."""
    with needs_extra("ImageFolder", "data"):
        from PIL import Image, ImageOps
    formats = ("PNG", "JPEG")
    with warnings.catch_warnings():
        # Pillow only warns above its limit of pixels, and raises an error above twice the limit.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(path, formats=formats) as image:
            if not image.tile:
                raise ValueError("the file has no pixels")
            image.verify()  # the checksums of PNG files, which are not checked otherwise
        with Image.open(path, formats=formats) as image:
            upright: Any = ImageOps.exif_transpose(image)
    upright.info.pop("transparency", None)  # Pillow would warn about transparent palettes
    deep = upright.mode.startswith("I")  # 16 bits, which Pillow would reduce to 8
    upright = Image.fromarray(np.asarray(upright, np.float32)) if deep else upright.convert("RGB" if color else "L")
    if sides is not None:
        upright = upright.resize(sides[::-1], Image.Resampling.BILINEAR)
    pixels = np.rint(np.asarray(upright)).astype(np.uint16) if deep else np.asarray(upright)
    return np.repeat(pixels[..., None], 3, axis=-1) if deep and color else pixels
