"""Pickled checkpoints, ``pytorch_model.bin``: tensors by name, and nothing else.

The format is torch.save's since 1.6: a zip of uncompressed records, of which ``data.pkl`` is a
pickle of a dict and ``data/N`` the bytes of a storage. The pickle's opcodes are read first: one
outside of what torch.save writes for a dict of tensors is refused by name, so nothing is imported,
called or sized by the file. torch's own weights-only unpickler then loads it, memory-mapped.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from reprlib import repr as short

import torch
from torch import Tensor

from sametoken.errors import CheckpointError, UnsupportedError
from sametoken.io.files import open_regular
from sametoken.models.load.files import AGAIN, unreadable
from sametoken.models.load.sources import FLOATING, TensorsByName

#: Of the pickle in a file: that of 40,000 tensors.
MAX_PICKLE_BYTES = 2**23
_CONVERT = "convert it to safetensors"
#: By opcode; REDUCE and BUILD act on the objects below alone.
_OPCODES = frozenset(
    (
        "PROTO",
        "MARK",
        "STOP",
        "EMPTY_DICT",
        "EMPTY_TUPLE",
        "TUPLE",
        "TUPLE1",
        "TUPLE2",
        "TUPLE3",
        "SETITEM",
        "SETITEMS",
        "BINUNICODE",
        "BINPUT",
        "LONG_BINPUT",
        "BINGET",
        "LONG_BINGET",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG1",
        "NONE",
        "NEWTRUE",
        "NEWFALSE",
        "GLOBAL",
        "BINPERSID",
        "REDUCE",
        "BUILD",
    )
)
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_GLOBALS = frozenset(
    (
        "collections OrderedDict",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_parameter",
        *(f"torch {name}Storage" for name in _STORAGES),
    )
)


class PickledSource(TensorsByName):
    """The tensors of pickled files, as a ``TensorSource``; the files stay mapped.

    Raises:
        CheckpointError: a file is broken, or two hold one tensor.
        UnsupportedError: a file holds something other than tensors by name.
    """

    def __init__(self, location: str, files: Sequence[Path]) -> None:
        found: dict[str, Tensor] = {}
        for path in files:
            for name, tensor in load_tensors(path).items():
                if name in found:
                    raise CheckpointError(f"tensor {name} is in {path.name} and in another", AGAIN)
                found[name] = tensor
        super().__init__(location, found)

    def chunks(self, name: str) -> Iterator[Tensor]:
        """Rows of the tensor, as views of the mapped file."""
        tensor = self._tensors[name]
        if tensor.dtype not in FLOATING:
            raise UnsupportedError(
                f"tensor {name} of {self.location} has dtype {tensor.dtype}",
                "use a checkpoint of unquantized weights",
            )
        yield from self.stored_chunks(name)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file by name, mapped and read-only.

    Raises:
        CheckpointError: the file is missing, truncated or corrupt.
        UnsupportedError: it holds something other than tensors by name, named in the message.
    """
    pickled, sizes = _records_of(path)
    _require_plain(path, pickled)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # A pickle that was made by hand fails in any way it likes.
        raise _corrupt(path, error) from error
    if not isinstance(loaded, dict):
        raise _strange(path, f"a {type(loaded).__name__}, no dict of tensors")
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise _strange(path, f"{short(name)}, which is no tensor but {type(value).__name__}")
        stored = value.untyped_storage().nbytes()
        # Strides of 0 make a tensor of any size from a few bytes.
        if stored not in sizes or value.numel() * value.itemsize > stored:
            raise _corrupt(path, ValueError(f"{short(name)} claims other bytes than its record's"))
    return {name: tensor.detach() for name, tensor in loaded.items()}


def _records_of(path: Path) -> tuple[bytes, frozenset[int]]:
    """``data.pkl`` of a file whose records are all uncompressed, and the sizes of its records."""
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            packed = [record for record in records if record.file_size != record.compress_size]
            pickles = [one for one in records if one.filename.rpartition("/")[2] == "data.pkl"]
            if packed or any(one.compress_type != zipfile.ZIP_STORED for one in records):
                raise _strange(path, "compressed records")
            if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
                raise _strange(path, f"no single data.pkl of at most {MAX_PICKLE_BYTES} bytes")
            return archive.read(pickles[0]), frozenset(one.file_size for one in records)
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is truncated, corrupt or older than torch 1.6 ({error})",
            f"download the checkpoint again, or {_CONVERT}",
        ) from error
    except OSError as error:
        raise unreadable(path, "cannot be read", error) from error
    except (ValueError, NotImplementedError, RuntimeError) as error:
        raise _corrupt(path, error) from error


def _require_plain(path: Path, pickled: bytes) -> None:
    """Refuse a pickle with what torch.save does not write for a dict of tensors."""
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name == "GLOBAL" and argument not in _GLOBALS:
                raise _strange(path, f"the object {str(argument)[:100].replace(' ', '.')!r}")
            if opcode.name not in _OPCODES:
                raise _strange(path, f"more than tensors (pickle opcode {opcode.name})")
    except (ValueError, UnicodeError) as error:
        raise _corrupt(path, error) from error


def _strange(path: Path, what: str) -> UnsupportedError:
    return UnsupportedError(f"{path} holds {what}", f"{_CONVERT}, or use another checkpoint")


def _corrupt(path: Path, error: Exception) -> CheckpointError:
    first = str(error).partition("\n")[0]
    return CheckpointError(f"{path} is truncated or corrupt ({short(first)})", AGAIN)
