"""Every rule for torch files, each with a file that breaks it and a neighbour that does not."""

from __future__ import annotations

import struct
import tarfile
import zipfile
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any

from helpers.checkpoints import ar
from helpers.torch_files import (
    EMPTY_HOOKS,
    a_dict,
    a_global,
    a_storage,
    a_tensor,
    a_tuple,
    call,
    legacy_file,
    number,
    pickled,
    saved,
    text,
    zip_file,
    zipped,
)
from tensorferry.errors import (
    CorruptFile,
    FormatError,
    TensorferryError,
    UnknownFormat,
    UnsafeFile,
    UnsupportedDtype,
)

NAME = "model.pt"
GOOD_PICKLE = pickled(a_dict(w=a_tensor()))
GOOD = zip_file(GOOD_PICKLE)
SAVED = saved({"w": ar(4), "v": ar(2, 3)})
OLD = legacy_file(pickled(a_dict(w=a_tensor(storage=a_storage(view=b"N")))))


def holding(*values: bytes, **more: bytes) -> bytes:
    """Return a zip torch file with the tensor `w` and these values beside it."""
    return zip_file(pickled(a_dict(w=a_tensor(), **{f"x{i}": v for i, v in enumerate(values)}, **more)))


def tensor(**how: Any) -> bytes:
    """Return a zip torch file with the one tensor `w`, of a storage of four float32."""
    return zip_file(pickled(a_dict(w=a_tensor(**how))))


def oldest(size: bytes) -> bytes:
    """Return a zip torch file with the one tensor `w` of this size, made by the oldest function that rebuilds one."""
    return a_call("_rebuild_tensor", a_storage(), number(0), a_tuple(size), a_tuple(number(1)))


def a_call(function: str, *args: bytes) -> bytes:
    """Return a zip torch file in which `w` is what a function of ``torch._utils`` makes."""
    return zip_file(pickled(a_dict(w=call(f"torch._utils.{function}", *args))))


def old(*, key: bytes | None = None, view: bytes = b"N", shape: tuple[int, ...] = (4,), **how: Any) -> bytes:
    """Return a legacy torch file with the one tensor `w`, of a storage of four float32."""
    return legacy_file(pickled(a_dict(w=a_tensor(shape, storage=a_storage(view=view)))), keys=key, **how)


def patched(data: bytes, at: int, new: bytes) -> bytes:
    at %= len(data)
    return data[:at] + new + data[at + len(new) :]


def central(data: bytes, name: str) -> int:
    """Where the directory entry of a record begins."""
    return data.rindex(name.encode()) - 46


def local(data: bytes, name: str) -> int:
    """Where the header of a record begins."""
    return data.index(name.encode()) - 30


def in_directory(field: int, new: bytes, name: str = "archive/data/0", data: bytes = GOOD) -> bytes:
    return patched(data, central(data, name) + field, new)


def in_header(field: int, new: bytes, name: str = "archive/data/0", data: bytes = GOOD) -> bytes:
    return patched(data, local(data, name) + field, new)


def nested(depth: int) -> bytes:
    """Return lists inside each other."""
    return b"]" * depth + b"a" * (depth - 1)


def twice(first: str, second: str) -> bytes:
    """Return a zip with two records of these names, whose length is equal."""
    data = zipped({"data.pkl": GOOD_PICKLE, "data/0": b"\1" * 16, first: b"a", "other": b"b"})
    return data.replace(b"archive/other", f"archive/{second}".encode())


def tar() -> bytes:
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), BytesIO(b""))
    return buffer.getvalue()


def script() -> bytes:
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("m/data.pkl", GOOD_PICKLE)
        archive.writestr("m/code/__torch__.py", b"x" * 99, zipfile.ZIP_DEFLATED)
        archive.writestr("m/constants.pkl", b"")
    return buffer.getvalue()


@dataclass(frozen=True)
class Rule:
    what: str
    refused: bytes
    says: str
    accepted: bytes = GOOD
    error: type[TensorferryError] = CorruptFile

    def __str__(self) -> str:
        return self.what.replace(" ", "-")


unsafe = partial(Rule, error=UnsafeFile)
foreign = partial(Rule, error=UnknownFormat)

ARCHIVE = [
    Rule("the last byte is missing", GOOD[:-1], "incomplete download?"),
    Rule("a byte follows", GOOD + b"\0", "incomplete download?"),
    Rule("a comment", GOOD[:-2] + b"\1\0x", "incomplete download?"),
    Rule("a comment of no bytes that says one", patched(GOOD, -2, b"\1\0"), "with a comment"),
    Rule("two disks", patched(GOOD, -18, b"\1\0"), "in several parts"),
    Rule("bytes before the archive", b"PK\3\4" + GOOD, "bytes are missing or added"),
    Rule("a record more than listed", patched(patched(GOOD, -14, b"\4\0"), -12, b"\4\0"), "183 bytes, too few"),
    Rule(
        "a record fewer than listed",
        patched(patched(GOOD, -14, b"\2\0"), -12, b"\2\0"),
        "61 bytes behind its last",
    ),
    Rule(
        "more records than fit",
        patched(patched(GOOD, -14, b"\xfe\xff"), -12, b"\xfe\xff"),
        "for 65,534 records",
    ),
    Rule("a directory entry without its mark", in_directory(0, b"XX"), "record 2 of the zip directory is malformed"),
    Rule("a name past the directory", in_directory(28, b"\xff\xff"), "record 2 of the zip directory is malformed"),
    Rule("the 64-bit end elsewhere", patched(SAVED, -42 + 8, b"\1"), "64-bit end", SAVED),
    Rule("the 64-bit end with another count", patched(SAVED, -98 + 32, b"\1"), "contradict each other", SAVED),
    Rule("the 64-bit end of another size", patched(SAVED, -98 + 4, b"\x2d"), "contradict each other", SAVED),
    Rule("a compressed record", zipped({"data.pkl": GOOD_PICKLE, "data/0": b"\1" * 16}, method=8), "is compressed"),
    Rule("a record compressed by its header only", in_header(8, b"\x08\0"), "no header"),
    Rule("packed and full sizes that differ", in_directory(20, b"\x0f\0\0\0"), "is compressed"),
    Rule("an encrypted record", in_directory(8, b"\1\0"), "is encrypted"),
    Rule("an encrypted record by its header only", in_header(6, b"\1\0"), "no header"),
    Rule("a record there twice", twice("extra", "extra"), "'archive/extra' is there twice", twice("extra", "extrb")),
    Rule("names equal but for case", twice("extra", "EXTRA"), "is there twice"),
    Rule("a record past the end", in_directory(20, struct.pack("<LL", 1 << 20, 1 << 20)), "1,048,576 bytes after"),
    Rule("a record inside another", in_directory(42, struct.pack("<L", 0)), "inside the record before it"),
    Rule(
        "a record over the directory",
        in_directory(20, struct.pack("<LL", 200, 200)),
        "by its own header and 200",
    ),
    Rule("a header elsewhere", in_directory(42, struct.pack("<L", local(GOOD, "archive/data/0") + 1)), "no header"),
    Rule("another name in the header", in_header(30, b"Archive/data/0"), "is called 'Archive/data/0' by its"),
    Rule("another size in the header", in_header(22, b"\x0f\0\0\0"), "15 bytes by its own header and 16"),
    Rule("another checksum in the header", in_header(14, b"\0\0\0\1"), "by its own header"),
    Rule(
        "another size behind the data",
        SAVED.replace(struct.pack("<LL", 16, 16), struct.pack("<LL", 16, 17), 1),
        "behind its data",
        SAVED,
    ),
    Rule("a 64-bit size that is missing", in_directory(24, b"\xff" * 4), "lacks its 64-bit size or place"),
    Rule("a name that is not UTF-8", GOOD.replace(b"archive/version", b"archive/vers\xffon"), "not UTF-8"),
    Rule("a name with a NUL", GOOD.replace(b"archive/version", b"archive/vers\0on"), "no plain relative path"),
    Rule("a name with a backslash", GOOD.replace(b"archive/version", b"archive/v\\rsion"), "no plain relative path"),
    Rule("a name that leads upwards", GOOD.replace(b"archive/version", b"archive/../sion"), "no plain relative path"),
    Rule("an absolute name", zipped({"/data.pkl": GOOD_PICKLE}), "without the record 'data.pkl'", error=UnknownFormat),
    Rule("a damaged pickle", GOOD.replace(GOOD_PICKLE, GOOD_PICKLE.replace(b"cpu", b"gpu")), "its checksum is"),
    Rule("a damaged small record", GOOD.replace(b"3\n", b"4\n", 1), "'version' is damaged"),
    Rule(
        "a pickle without checksum in a file with others",
        in_header(14, b"\0" * 4, "archive/data.pkl", in_directory(16, b"\0" * 4, "archive/data.pkl")),
        "'data.pkl' is damaged",
    ),
    Rule("bytes behind the pickle", zip_file(GOOD_PICKLE + b"."), "1 bytes follow the pickle"),
    Rule(
        "big-endian values",
        zip_file(GOOD_PICKLE, byteorder=b"big"),
        "big-endian",
        zip_file(GOOD_PICKLE, byteorder=b"little"),
        FormatError,
    ),
    Rule("values in no known order", zip_file(GOOD_PICKLE, byteorder=b"pdp"), "not 'little' or 'big'"),
    foreign("no folder", zipped({"data.pkl": GOOD_PICKLE}, root=""), "not in one folder"),
    foreign("two folders", zipped({"a/data.pkl": GOOD_PICKLE, "b/data/0": b""}, root=""), "not in one folder"),
    foreign("no pickle", zipped({"data/0": b"\1" * 16}), "without the record 'data.pkl'"),
    foreign("arrays of numpy", zipped({"w.npy": b""}, root=""), "torch.save did not write: its records"),
    foreign("TorchScript", script(), "a TorchScript archive"),
    foreign("torch.package", zipped({"data.pkl": b"", ".data/extern_modules": b""}), "a torch.package archive"),
    foreign("an exported program", zipped({"archive_format": b"pt2"}), "torch.export"),
]

FOREIGN = [
    Rule("no bytes", b"", "it is empty"),
    foreign("a tar of torch before 0.4", tar(), "a tar archive, as torch before 0.4"),
    foreign("an empty zip", b"PK\5\6" + b"\0" * 18, "an empty zip archive"),
    foreign("safetensors", struct.pack("<Q", 16) + b'{"w":{"dtype":"F', "a safetensors file"),
    foreign("GGUF", b"GGUF\3\0\0\0", "a GGUF file"),
    foreign("HTML", b"<!DOCTYPE html><html>", "an HTML page"),
    foreign("a pointer of Git-LFS", b"version https://git-lfs.github.com/spec/v1\noid", "a Git-LFS pointer"),
    foreign("CTranslate2", b"\6\0\0\0\x10\0TransformerSpec\0", "a CTranslate2 model"),
    foreign("JSON", b'{"error": 404}', "JSON text"),
    foreign("gzip", b"\x1f\x8b\x08", "gzip-compressed"),
    foreign("HDF5", b"\x89HDF\r\n\x1a\n", "an HDF5 file"),
    foreign("zeros", b"\0" * 100, "all zeros"),
    foreign("noise", b"\x07noise", "nothing that is known here"),
    foreign("another pickle", pickled(a_dict(a=b"N")), "a Python pickle that torch.save did not write", OLD),
]

PICKLE = [
    unsafe("os.system", holding(call("os.system", text("true"))), "'x0': its pickle asks for 'os.system'"),
    unsafe("posix.system", holding(call("posix.system", text("true"))), "'posix.system'"),
    unsafe("a payload in the top object", zip_file(pickled(call("os.system", text("true")))), "'os.system'"),
    unsafe("a payload in a plain pickle", pickled(call("os.system", text("true"))), "'os.system'", OLD),
    unsafe("a payload in a legacy file", legacy_file(pickled(call("os.system", text("true")))), "'os.system'", OLD),
    unsafe("a payload in the list of storages", old(key=pickled(call("os.system", text("true")))), "'os.system'", OLD),
    unsafe("an import", holding(call("importlib.import_module", text("this"))), "'importlib.import_module'"),
    unsafe("__import__", holding(call("builtins.__import__", text("this"))), "'builtins.__import__'"),
    unsafe("eval", holding(call("builtins.eval", text("1"))), "'builtins.eval'", holding(call("builtins.list"))),
    unsafe("eval of Python 2", holding(call("__builtin__.eval", text("1"))), "'__builtin__.eval'",
           holding(call("__builtin__.list"))),
    unsafe("exec by STACK_GLOBAL", holding(text("builtins") + text("exec") + b"\x93"), "'builtins.exec'",
           holding(text("builtins") + text("dict") + b"\x93)R")),
    unsafe("getattr", holding(call("builtins.getattr", text("a"), text("b"))), "'builtins.getattr'"),
    unsafe("a class that is only named", holding(a_global("subprocess.Popen")), "'subprocess.Popen'",
           holding(a_global("torch.float32"))),
    unsafe("a class that is thrown away", zip_file(pickled(a_global("os.system"), b"0", a_dict(w=a_tensor()))), "os"),
    unsafe("an attribute of a known name", holding(a_global("collections.OrderedDict.fromkeys")), "fromkeys"),
    unsafe("torch.load inside", holding(call("torch.storage._load_from_bytes", b"C\0")), "_load_from_bytes"),
    unsafe("a whole module", holding(a_global("torch.nn.modules.linear.Linear") + b")\x81"), "linear.Linear"),
    unsafe("INST", holding(b"(ios\nsystem\n"), "'os.system'"),
    unsafe("the extension registry", holding(b"\x82\1"), "extension registry"),
    unsafe("a class from numpy", holding(a_global("numpy.testing._private.utils.runstring")), "runstring",
           holding(call("numpy.core.multiarray.scalar", call("numpy.dtype", text("f8")), b"C\x08" + b"\0" * 8))),
    Rule("OBJ", holding(b"(c__builtin__\nlist\no"), "opcode 0x6f"),
    Rule("a call of what is no function", holding(text("os") + b")R"), "calls what is no function"),
    Rule("a call of a dtype", holding(a_global("torch.float32") + b")R"), "calls what is no function",
         holding(a_global("torch.float32"))),
    Rule("a call without a tuple", holding(a_global("builtins.list") + b"]R"), "calls what is no function",
         holding(a_global("builtins.list") + b")R")),
    Rule("keywords", holding(a_global("builtins.dict") + b")" + a_dict(a=b"N") + b"\x92"), "with keywords",
         holding(a_global("builtins.dict") + b")}\x92")),
    Rule("state on a tensor", holding(a_tensor() + b"}b"), "state of a value that has none",
         holding(EMPTY_HOOKS + a_dict(a=b"N") + b"b")),
    Rule("state on a list", holding(b"]}b"), "state of a value that has none"),
    Rule("text to a number", holding(call("builtins.int", text("1"))), "which no writer does",
         holding(call("builtins.int", number(1)))),
    Rule("another codec", holding(call("_codecs.encode", text("a"), text("rot13"))), "bytes are made of",
         holding(call("_codecs.encode", text("a"), text("latin1")))),
    Rule("a default that is no type", holding(call("collections.defaultdict", text("a"))), "no plain type",
         holding(call("collections.defaultdict", a_global("builtins.list")))),
    Rule("an opcode that is none", holding(b"\xff"), "opcode 0xff"),
    Rule("PERSID", holding(b"P0\n"), "opcode 0x50"),
    Rule("a buffer from outside", holding(b"\x97"), "opcode 0x97"),
    Rule("protocol 6", zip_file(b"\x80\6" + GOOD_PICKLE[2:]), "pickle protocol 6",
         zip_file(b"\x80\5" + GOOD_PICKLE[2:])),
    Rule("no STOP", zip_file(GOOD_PICKLE[:-1]), "truncated"),
    Rule("no pickle in the record", zip_file(b""), "truncated"),
    Rule("STOP on an empty stack", zip_file(pickled()), "more or less than one object"),
    Rule("two objects", zip_file(pickled(b"N", a_dict(w=a_tensor()))), "more or less than one object"),
    Rule("an open mark", zip_file(pickled(b"(", a_dict(w=a_tensor()))), "more or less than one object"),
    Rule("an empty stack", zip_file(pickled(b"R")), "an empty stack"),
    Rule("no mark", zip_file(pickled(b"t")), "an empty stack"),
    Rule("a value from below the mark", holding(b"](\x85"), "an empty stack", holding(b"]\x85")),
    Rule("a pop of nothing", zip_file(pickled(b"0", a_dict(w=a_tensor()))), "an empty stack"),
    Rule("a memo that was never filled", holding(b"h\x63"), "recalls value 99", holding(b"Nq\x630h\x63")),
    Rule("text past the end", holding(b"X\xff\0\0\0short"), "truncated"),
    Rule("text of four gigabytes", holding(b"X\xff\xff\xff\xffshort"), "truncated"),
    Rule("bytes of eight exabytes", holding(b"\x8e" + b"\xff" * 7 + b"\x7f"), "truncated"),
    Rule("a frame past the end", holding(b"\x95" + b"\xff" * 8), "a frame is longer",
         holding(b"\x95" + b"\0" * 8 + b"N")),
    Rule("text that is not UTF-8", holding(b"X\1\0\0\0\xff"), "not UTF-8", holding(b"U\1\xff")),
    Rule("a number that is none", holding(b"Iab\n"), "a number that is none", holding(b"I7\n")),
    Rule("a number with underscores", holding(b"I1_0\n"), "a number that is none", holding(b"L10L\n")),
    Rule("a line without end", holding(b"I" + b"1" * 5000), "does not end"),
    Rule("a key twice", holding(b"}(" + (text("a") + b"N") * 2 + b"u"), "'a' is set twice"),
    Rule("half an item", holding(b"}(" + text("a") + b"u"), "half an item"),
    Rule("items of a list", holding(b"](" + text("a") + b"Nu"), "items of what is no dict"),
    Rule("append to a dict", holding(b"}Na"), "appends to what is no list"),
    Rule("add to a list", holding(b"](N\x90"), "adds to what is no set", holding(b"\x8f(N\x90")),
    Rule("a list in itself", holding(b"]q\1h\1a"), "holds itself", holding(b"]q\1]h\1a0")),
    Rule("a dict in itself", holding(b"}q\1" + text("a") + b"h\1s"), "holds itself"),
    Rule("a set in itself", holding(b"\x8fq\1(h\1\x90"), "holds itself"),
    Rule("a tuple in itself", holding(b"]q\1h\1\x85a"), "holds itself"),
    Rule("a dict as its own state", holding(b"}q\1h\1b"), "holds itself"),
    Rule("containers 100 deep", holding(nested(100)), "deeper than 100", holding(nested(99))),
    Rule("tuples 100,000 deep as a key", holding(b"})" + b"\x85" * 100_000 + b"Ns"), "deeper than 100",
         holding(b"})" + b"\x85" * 90 + b"Ns")),
    Rule("depth through a shared list", holding(b"]" * 60 + b"a" * 59 + b"q\1", b"]" * 50 + b"h\1" + b"a" * 50),
         "deeper than 100", holding(nested(60), nested(60))),
    Rule("an object that is persistent in a preamble", old(preamble=pickled(text("0") + b"Q")), "none belongs", OLD),
    Rule("a persistent id of four fields", holding(a_tuple(*(b"N",) * 4) + b"Q"), "five fields of a storage"),
    Rule("a persistent id that is text", holding(text("0") + b"Q"), "five fields of a storage"),
    Rule("a persistent module", holding(a_tuple(text("module"), *(b"N",) * 4) + b"Q"), "five fields of a storage"),
    Rule("a storage of no class", holding(a_tuple(text("storage"), b"N", text("0"), text("cpu"), number(4)) + b"Q"),
         "whose class, key, location or size is none"),
    Rule("a storage of negative size", holding(a_storage(-4)), "whose class, key, location or size is none"),
    Rule("a storage of two sizes", holding(a_storage(3)), "16 bytes in one place and 12", holding(a_storage(4))),
    Rule("a storage of true elements", tensor(storage=a_tuple(text("storage"), a_global("torch.FloatStorage"),
         text("0"), text("cpu"), b"\x88") + b"Q"), "size is none"),
]  # fmt: skip

TENSOR = [
    Rule("one element past the end", tensor(shape=(5,)), "'w': elements 0 to 5 of a storage that has 4"),
    Rule("an offset past the end", tensor(offset=1), "'w': elements 1 to 5", tensor(shape=(3,), offset=1)),
    Rule("strides past the end", tensor(shape=(2, 2), strides=(3, 1)), "elements 0 to 5",
         tensor(shape=(2, 2), strides=(2, 1))),
    Rule("an empty tensor past the end", tensor(shape=(0,), offset=5), "elements 5 to 5", tensor(shape=(0,), offset=4)),
    Rule("a negative offset", tensor(offset=-1), "'w': negative"),
    Rule("a negative size", tensor(shape=(-1,)), "'w': negative"),
    Rule("a negative stride", tensor(strides=(-1,), offset=3), "'w': negative"),
    Rule("a negative stride of an empty tensor", tensor(shape=(0,), strides=(-1,)), "'w': negative",
         tensor(shape=(0,), strides=(1,))),
    Rule("expansion", tensor(strides=(0,)), "'w': an expanded view", tensor(shape=(1,), strides=(0,))),
    Rule("expansion beyond all memory", tensor(shape=(1 << 40,), strides=(0,)), "'w': an expanded view"),
    Rule("rows that overlap", tensor(shape=(2, 2), strides=(1, 1)), "'w': an expanded view",
         tensor(shape=(2, 2), strides=(1, 2))),
    Rule("a shape that wraps", tensor(shape=(1 << 32, 1 << 32), strides=(1 << 32, 1)), "beyond 64-bit sizes"),
    Rule("a size of 65 bits", tensor(shape=(1 << 64,)), "not 64-bit integers"),
    Rule("an offset of 65 bits", tensor(offset=1 << 64), "not a 64-bit integer"),
    Rule("a size that is a float", oldest(b"G" + struct.pack(">d", 4.0)), "not 64-bit integers", oldest(number(4))),
    Rule("65 dimensions", tensor(shape=(1,) * 65, strides=(1,) * 65), "65 sizes",
         tensor(shape=(1,) * 64, strides=(1,) * 64)),
    Rule("more sizes than strides", tensor(shape=(2, 2)), "2 sizes and 1 strides"),
    Rule("no storage", zip_file(pickled(a_dict(w=a_tensor(storage=text("0"))))), "'w': a tensor of something that is"),
    Rule("a tensor of five fields", a_call("_rebuild_tensor_v2", *(b"N",) * 5), "'w': a tensor of 5 fields"),
    Rule("version 3 without a dtype", a_call("_rebuild_tensor_v3", *(b"N",) * 7), "'w': a tensor of version 3 without"),
    Rule("a Parameter of a number", a_call("_rebuild_parameter", *(b"N",) * 3), "'w': a Parameter of something"),
    Rule("a tensor from another function", zip_file(pickled(a_dict(w=call("torch._tensor._rebuild_from_type_v2",
         a_global("builtins.list"), a_global("torch.Tensor"), b")", b"}")))), "made of something else"),
    Rule("a storage that is not there", tensor(storage=a_storage(key="1")), "'w': its storage '1' is not in the file"),
    Rule("a storage key with a path", tensor(storage=a_storage(key="../data/0")), "is not in the file"),
    Rule("a storage of another size", zip_file(GOOD_PICKLE, storage=b"\1" * 15), "should have 16 bytes, the file has"),
    Rule("a storage of a huge size", tensor(storage=a_storage(1 << 60)), "the file has 16"),
    Rule("a storage on meta", tensor(storage=a_storage(location="meta")), "'w': it is on the meta device",
         tensor(storage=a_storage(location="cuda:0")), FormatError),
    Rule("a conjugate", tensor(flags=a_dict(conj=b"\x88")), "'w': a lazily conjugated",
         tensor(flags=a_dict(conj=b"\x89")), FormatError),
    unsafe("hooks", tensor(hooks=EMPTY_HOOKS + b"(" + number(0) + b"Nu"), "'w': it carries backward hooks"),
    unsafe("hooks that are no dict", tensor(hooks=b"](Ne"), "'w': it carries backward hooks", tensor(hooks=b"N")),
    unsafe("hooks of a Parameter", a_call("_rebuild_parameter", a_tensor(), b"\x88", EMPTY_HOOKS + b"(KaNu"),
           "'w': it carries backward hooks",
           a_call("_rebuild_parameter", a_tensor(), b"\x88", EMPTY_HOOKS)),
    Rule("a quantized tensor", holding(a_global("torch._utils._rebuild_qtensor")),
         "'x0': a tensor of one of torch's own quantized", error=UnsupportedDtype),
    *(Rule(f"a {kind}", tensor(shape=(16,), storage=a_storage(16, kind=f"torch.{kind}")), "'w': dtype torch.q",
           tensor(shape=(16,), storage=a_storage(16, kind="torch.ByteStorage")), UnsupportedDtype)
      for kind in ("QUInt8Storage", "QInt8Storage", "QUInt4x2Storage", "QUInt2x4Storage")),
    *(Rule(kind, holding(a_global(f"torch._utils._rebuild_{kind}")), "'x0': a ", error=FormatError)
      for kind in ("sparse_tensor", "nested_tensor", "meta_tensor_no_storage", "wrapper_subclass")),
]  # fmt: skip

MAGIC = pickled(number(0x1950A86A20F9469CFC6C))
TAIL = struct.pack("<Q", 4) + b"\1" * 16

LEGACY = [
    Rule("another version", old(preamble=MAGIC + pickled(number(1002)) + pickled(b"}")),
         "another version than 1001", OLD),
    Rule("no system", old(preamble=MAGIC + pickled(number(1001)) + pickled(b"N")),
         "system that wrote it is missing", OLD),
    Rule("a big-endian system",
         old(preamble=MAGIC + pickled(number(1001)) + pickled(a_dict(little_endian=b"\x89"))), "big-endian", OLD,
         FormatError),
    Rule("no list of storages", old(key=pickled(b"N")), "list of its storages is missing", OLD),
    Rule("an empty list of storages", old(key=pickled(b"]"), tail=b""), "1 storages are used and 0 are listed", OLD),
    Rule("a storage listed twice", old(key=pickled(b"](" + text("0") * 2 + b"e"), tail=TAIL * 2), "are listed", OLD),
    Rule("a storage nobody uses", old(key=pickled(b"](" + text("0") + text("1") + b"e"), tail=TAIL * 2), "'1'", OLD),
    Rule("keys that are no text", old(key=pickled(b"](" + number(0) + b"e")), "something else than keys", OLD),
    Rule("another length", old(tail=struct.pack("<Q", 3) + b"\1" * 16), "'w' has 4 elements", OLD),
    Rule("a length with its sign", old(tail=b"\xff" * 8 + b"\1" * 16), "18,446,744,073,709,551,615", OLD),
    Rule("the last byte is missing", OLD[:-1], "truncated: storage '0' of tensor 'w'", OLD),
    Rule("a byte follows", OLD + b"\0", "1 bytes follow", OLD),
    Rule("a view past its storage", old(view=a_tuple(text("v"), number(1), number(4))), "a view of elements 1 to 5",
         old(view=a_tuple(text("v"), number(0), number(4)))),
    Rule("a tensor past its view", old(view=a_tuple(text("v"), number(1), number(3))), "of a storage that has 3",
         old(view=a_tuple(text("v"), number(1), number(3)), shape=(3,))),
    Rule("a view of two fields", old(view=a_tuple(text("v"), number(1))), "not a key, an offset and a size", OLD),
    Rule("a storage id without a view", legacy_file(GOOD_PICKLE), "five fields of a storage", OLD),
]  # fmt: skip

RULES = [*ARCHIVE, *FOREIGN, *PICKLE, *TENSOR, *LEGACY]
