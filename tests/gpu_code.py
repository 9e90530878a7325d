"""What Triton makes of the GPU kernel for a device that is not here, read from PTX and SASS."""

import functools
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

import pytest
import torch

if sys.platform != "linux":
    pytest.skip("Triton is made for Linux", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rotary.kernels.triton import kernel as compiled

_KINDS = {torch.int64: "*i64", torch.float32: "*fp32", torch.int32: "*i32"}
_KINDS |= {torch.float16: "*fp16", torch.bfloat16: "*bf16"}
_VECTORS = {"64": 2, "128": 4}  # registers of one access


@dataclass
class Code:
    cubin: bytes = field(compare=False, repr=False)
    loads: dict[int, int]  # how many of so many bits
    stores: dict[int, int]
    barriers: int
    shared: int  # bytes
    registers: int
    local: int  # bytes of the stack
    fused: int  # products that are added without being rounded

    @functools.cached_property
    def listing(self):
        """Its instructions in order; made when asked for, as it takes as long as the compiler."""
        path = triton.knobs.nvidia.nvdisasm.path
        return _instructions(_read(self.cubin, path, "-c", "-ndf"))

    @property
    def waits(self) -> int:
        """Loads in series before the first store: each follows a wait for the one before."""
        return waits_in_series(self.listing)


def compile_for(plan, operands, target, is_fused=None):
    """A launch compiled for a target; operands may be on any device, "meta" too.

    is_fused  whether the compiler may add products that are not rounded; default as in a call
    """
    names = compiled.kernel.arg_names
    signature = dict.fromkeys(names, "i32") | {"factor": "fp32"}
    signature |= {n: _KINDS[t.dtype] for n, t in zip(names, operands, strict=False)}
    signature |= dict.fromkeys(plan.constants, "constexpr")
    constants = {(names.index(name),): value for name, value in plan.constants.items()}
    aligned = [index for index, t in enumerate(operands) if t.data_ptr() % 16 == 0]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    source = ASTSource(compiled.kernel, signature, constants, attributes)
    is_fused = plan.constants["EXACT"] if is_fused is None else is_fused
    options = {"num_warps": plan.warps, "enable_fp_fusion": is_fused}
    return triton.compile(source, target=target, options=options)


def code_of(plan, operands, arch, is_fused=None):
    """The code of a launch for an NVIDIA architecture such as 90."""
    result = compile_for(plan, operands, GPUTarget("cuda", arch, 32), is_fused)
    cubin, ptx = result.asm["cubin"], result.asm["ptx"]
    registers, local = used_by(cubin)
    return Code(
        cubin, widths("ld", ptx), widths("st", ptx), len(re.findall(r"\bbar\.sync", ptx)),
        result.metadata.shared, registers, local, len(re.findall(r"\bfma\.", ptx)),
    )  # fmt: skip


def used_by(cubin):
    """(registers, bytes of the stack) of a thread."""
    text = _read(cubin, triton.knobs.nvidia.cuobjdump.path, "-res-usage")
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return used["REG"], used["STACK"] + used["LOCAL"]


def widths(kind, ptx):
    """How many accesses of so many bits, of kind "ld" or "st", the code has for global memory."""
    found = re.findall(rf"\b{kind}\.global[.:\w]*?(?:\.v(\d))?\.b(\d+)", ptx)
    assert len(found) == len(re.findall(rf"\b{kind}\.global", ptx))
    bits = [int(count or 1) * int(each) for count, each in found]
    return {width: bits.count(width) for width in set(bits)}


def _read(cubin, *command):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, check=True, text=True
        ).stdout  # fmt: skip


def _instructions(text):
    found = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);", text, re.MULTILINE)
    return [re.sub(r"^@!?U?P\w+\s+", "", each.strip()) for each in found]


def _accesses(instructions):
    """Of every instruction: (registers that it reads, registers that a load will fill)."""
    for each in instructions:
        name = each.split()[0].split(".")
        numbers = [int(number) for number in re.findall(r"\bR(\d+)\b", each)]
        count = next((_VECTORS[part] for part in name if part in _VECTORS), 1)
        if name[0] == "LDG":
            yield set(numbers[1:]), set(range(numbers[0], numbers[0] + count))
        elif name[0] == "STG":
            yield {*numbers, *range(numbers[-1], numbers[-1] + count)}, set()
        else:
            yield set(numbers), set()


def waits_in_series(instructions):
    """How often something waits for loads that were asked for after the wait before."""
    first = next(index for index, each in enumerate(instructions) if each.startswith("STG"))
    arrives, waits = {}, 0  # the wait that ends when the number in a register is there
    for read, filled in _accesses(instructions[: first + 1]):
        waits = max([waits, *(arrives.pop(register) for register in read & arrives.keys())])
        arrives |= dict.fromkeys(filled, waits + 1)
    return waits
