"""What the tables of third-party kernels share: a release's modules, and bytes that are compared.

A test puts random bytes into every buffer, runs a kernel on the cpu lane, and writes what the op
means into the mirrors of the buffers. `Surface.check` then compares all bytes of all buffers, so a
byte that must not change is compared as well.
"""

import enum
import importlib.util
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

pytest.register_assert_rewrite("attention_reference")

# The helper modules beside this file are no package; tests import them by their own names.
sys.path.insert(0, str(Path(__file__).parent))

NUMPY = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}


class Buffer:
    """Random bytes that kernels see, and a mirror that holds what must be in them."""

    def __init__(self, name, memory, content):
        self.name = name
        self.memory = memory
        memory.copy_(content)
        self.mirror = content.numpy().copy()

    @property
    def address(self):
        return self.memory.data_ptr()

    def view(self, dtype, shape, strides=None, offset=0):
        """A tensor over the bytes; strides and offset in elements."""
        typed = self.memory[: len(self.memory) // dtype.itemsize * dtype.itemsize].view(dtype)
        if strides is None:
            strides = torch.empty(shape, device="meta").stride()
        return torch.as_strided(typed, shape, strides, typed.storage_offset() + offset)

    def expect(self, byte, data):
        """Bytes, or an array of any type, must be found from `byte` on."""
        raw = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else _raw(data)
        self.mirror[byte : byte + len(raw)] = raw

    def typed(self, dtype):
        """The mirror as numpy elements."""
        return self.mirror[: len(self.mirror) // dtype.itemsize * dtype.itemsize].view(NUMPY[dtype])


def _raw(array):
    return np.atleast_1d(np.ascontiguousarray(array)).view(np.uint8).reshape(-1)


class Cache:
    """K and V `[num_blocks, block_size, num_kv_heads, head_size]` in one buffer, 16 elements in.

    `k(b, s, h)` and `v(b, s, h)` are the bytes where a head of a token starts.
    """

    def __init__(self, buffer, dtype, shape, strides, v_offset):
        self.buffer = buffer
        self.dtype = dtype
        self._strides = strides
        self._offsets = {"k": 16, "v": 16 + v_offset}
        self.key = buffer.view(dtype, shape, (*strides, 1), 16)
        self.value = buffer.view(dtype, shape, (*strides, 1), 16 + v_offset)

    def k(self, b, s, h):
        return self._byte("k", b, s, h)

    def v(self, b, s, h):
        return self._byte("v", b, s, h)

    def _byte(self, side, b, s, h):
        block, token, head = self._strides
        return (self._offsets[side] + b * block + s * token + h * head) * self.dtype.itemsize


def _strides(layout, num_blocks, block_size, num_kv_heads, head_size):
    """Block, token and head stride, and how far V lies behind K, in elements."""
    row = num_kv_heads * head_size
    page = block_size * row
    return {
        "kv_first": ((page, row, head_size), num_blocks * page),
        "hybrid": ((2 * page, row, head_size), page),
        "blocks_first_hnd": ((2 * page, head_size, block_size * head_size), page),
        "content_packed_hnd": ((2 * page, 2 * head_size, 2 * block_size * head_size), head_size),
        "content_packed_nhd": ((2 * page, 2 * row, 2 * head_size), head_size),
        "padded_page": ((2 * page + 48, row, head_size), page),
    }[layout]


class Surface:
    """The buffers of one launch and the modules of one release."""

    def __init__(self, lane, trees):
        self._lane = lane
        self._trees = trees
        self._buffers = []
        self.random = np.random.default_rng(20260)

    def load(self, release, *candidates, arch="gfx942"):
        """A module of a release, with stubs around it."""
        return self._trees(release, arch).load(*candidates)

    def bytes(self, name, nbytes, without=()):
        """A buffer of random bytes, zero in place of those in `without`."""
        content = self.random.integers(0, 256, nbytes, np.uint8)
        content[np.isin(content, without)] = 0
        return self._add(name, torch.from_numpy(content))

    def cache(self, name, layout, dtype, shape, without=()):
        """A cache in a named layout, with bytes before, behind and between that are nobody's."""
        strides, v_offset = _strides(layout, *shape)
        last = sum((n - 1) * stride for n, stride in zip(shape[:3], strides, strict=True))
        numel = 16 + v_offset + last + shape[3] + 16
        buffer = self.bytes(name, numel * dtype.itemsize, without)
        return Cache(buffer, dtype, shape, strides, v_offset)

    def tensor(self, name, values):
        """A tensor that no kernel may change, unless the buffer's mirror says so."""
        return self.given(name, values)[0]

    def given(self, name, values):
        """A tensor of given values and its buffer."""
        values = values.contiguous()
        buffer = self._add(name, values.view(-1).view(torch.uint8).clone())
        return buffer.view(values.dtype, values.shape), buffer

    def _add(self, name, content):
        buffer = Buffer(name, self._lane.allocate(name, len(content)), content)
        self._buffers.append(buffer)
        return buffer

    def rows(self, name, shape, dtype, gap=0, bits=False):
        """A tensor `shape` whose rows lie `gap` elements apart, and its elements as numpy.

        They are normally distributed, or random bits, which a plain copy must keep.
        """
        row = int(np.prod(shape[1:]))
        buffer = self.bytes(name, (shape[0] * (row + gap) + 16) * dtype.itemsize)
        inner = torch.empty(shape[1:], device="meta").stride()
        view = buffer.view(dtype, shape, (row + gap, *inner), 16)
        if not bits:
            view.copy_(torch.from_numpy(self.random.normal(size=shape)))
            buffer.mirror[:] = buffer.memory.numpy()
        kept = view.contiguous().view(torch.uint8).numpy().view(NUMPY[dtype])
        return view, kept.reshape(shape)

    def accept(self, tensor):
        """What a test itself put into a tensor is what must stay there."""
        for buffer in self._buffers:
            if buffer.memory.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                buffer.mirror[:] = buffer.memory.numpy()

    def check(self):
        """Every byte of every buffer is what it must be."""
        __tracebackhide__ = True
        for buffer in self._buffers:
            wrong = np.flatnonzero(buffer.memory.numpy() != buffer.mirror)
            if len(wrong):
                at = wrong[0]
                pytest.fail(
                    f"{buffer.name}: {len(wrong)} of {len(buffer.mirror)} bytes are wrong, first "
                    f"byte {at}\nexpected {buffer.mirror[at]:#04x}\nbut got  "
                    f"{int(buffer.memory[at]):#04x}"
                )

    def release(self):
        """Forget the buffers, so that their names are free for another launch."""
        self._buffers.clear()
        self._lane.release_all()


class _CudagraphSupport(enum.Enum):
    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


def _unchanged(function):
    return function


def _nothing(**_):
    return None


def _known(arch):
    """Also the values that these tables' files use in class bodies and decorators."""
    from kvfuzz.kernels.vllm_stubs import known

    platform = known(arch)
    torch_utils = {
        **platform["vllm.utils.torch_utils"],
        "async_tensor_h2d": lambda data, device, dtype: torch.tensor(data, dtype=dtype),
        "direct_register_custom_op": _nothing,
    }
    return {
        **platform,
        "vllm.utils.torch_utils": torch_utils,
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": _unchanged},
        "vllm.platforms.rocm": {"_ON_GFX942": arch == "gfx942", "_ON_GFX950": arch == "gfx950"},
        "vllm.utils.math_utils": {"largest_power_of_2_divisor": lambda n: n & -n},
        "vllm.v1.attention.backend": {"AttentionCGSupport": _CudagraphSupport},
        "vllm.v1.attention.backends.utils": {
            "AttentionCGSupport": _CudagraphSupport,
            "PAD_SLOT_ID": -1,
        },
        "vllm.model_executor.layers.attention.mla_attention": {
            "QueryLenSupport": enum.Enum("QueryLenSupport", "SINGLE_ONLY UNIFORM VARLEN")
        },
        "vllm.v1.utils": {"CpuGpuBuffer": type("CpuGpuBuffer", (), {})},
        "vllm.model_executor.warmup.jit_warmup": {"kernel_launcher": _unchanged},
        "vllm.model_executor.warmup.jit_warmup_triton_helper": {
            "triton_kernel_dispatcher_with_warmup": lambda **_: _unchanged
        },
    }


@pytest.fixture(scope="session")
def trees():
    """Open a release's source tree for an architecture; each is opened once."""
    from kvfuzz.kernels.source_loader import SourceTree

    sources = _sources_module()
    opened = {}

    def open_tree(release, arch):
        if (release, arch) not in opened:
            root = sources.tree(release)
            if not sources.is_complete(root):
                pytest.fail(
                    f"no complete tree of vLLM {release}: "
                    f"python tests/thirdparty/sources.py {release}"
                )
            opened[release, arch] = SourceTree(
                "vllm", root, known=_known(arch), also=("aiter", "flashinfer")
            )
        return opened[release, arch]

    return open_tree


def _sources_module():
    path = Path(__file__).parent / "sources.py"
    spec = importlib.util.spec_from_file_location("kvfuzz_surface_sources", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def surface_lane():
    """The cpu lane, active while the tests of one module run."""
    from kvfuzz.cpu import CpuLane

    lane = CpuLane()
    lane.activate()
    yield lane
    lane.deactivate()


@pytest.fixture
def unwatched_surface(surface_lane, trees):
    """The buffers and modules of one test, which may observe launches itself."""
    opened = Surface(surface_lane, trees)
    yield opened
    opened.release()


@pytest.fixture
def surface(surface_lane, unwatched_surface):
    """The buffers and modules of one test, in which no kernel may race or overflow."""
    with surface_lane.observe() as access:
        yield unwatched_surface
    assert access.overflows == []
    assert access.found_races == []


@pytest.fixture(scope="module")
def launcher():
    """Runs a launch on the lane once, however many tests of the module ask for its outcome."""
    import torch
    from attention_launch import Launcher

    from kvfuzz.cpu import CpuLane

    # The references are many small sums, which threads only slow down.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lane = CpuLane()
    lane.activate()
    yield Launcher(lane)
    lane.deactivate()
    torch.set_num_threads(threads)


@pytest.fixture
def tree(vllm):
    """The source tree of a vLLM release, with the stubs that attention kernels need."""
    from attention_launch import attention_tree

    return lambda release: attention_tree(vllm(release)["vllm"])
