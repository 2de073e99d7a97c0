"""A parallel region in machine code: the threads of OpenMP meet inside a numba kernel, without Python.

A callback of Python's needs a thread's state and the interpreter's lock, one thread after the other, which takes 50 µs
of each call where two threads share a product of 40.
"""

# llvmlite has no types for what it builds.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from halfbyte.kernels.common.llvm import I8, I32, I64

# The function of GNU OpenMP. Whoever calls code with a region has made the name known to LLVM (threads.py).
START = "GOMP_parallel"
POINTER = I8.as_pointer()


@intrinsic
def region(typing_context, kernel, pieces, size, arguments):
    """kernel(begin, end, *arguments) over range(size) in so many pieces, on as many threads; a thread that is done
    takes the next. Returns whether all pieces were computed: a kernel that raises ends its piece."""
    kinds = (types.intp, types.intp, *arguments.types)
    inner = kernel.get_call_type(typing_context, kinds, {})
    signature = types.boolean(kernel, types.intp, types.intp, arguments)

    def lower(context, builder, signature, values):
        _, pieces, size, packed = values
        compiled = kernel.dispatcher.overloads[inner.args]
        context.active_code_library.add_linking_library(compiled.library)
        fields = ir.LiteralStructType([I64, I64, I64, I32, packed.type])  # next piece, pieces, size, failed, arguments
        shared = cgutils.alloca_once(builder, fields)
        for place, value in enumerate((I64(0), pieces, size, I32(0), packed)):
            builder.store(value, cgutils.gep_inbounds(builder, shared, 0, place))
        work = _work(context, builder, fields, compiled.fndesc, inner, len(arguments.types))
        start = ir.FunctionType(ir.VoidType(), [work.type, POINTER, I32, I32])
        run = cgutils.get_or_insert_function(builder.module, start, START)
        builder.call(run, [work, builder.bitcast(shared, POINTER), builder.trunc(pieces, I32), I32(0)])
        failed = builder.load(cgutils.gep_inbounds(builder, shared, 0, 3))
        done = builder.icmp_unsigned("==", failed, I32(0))
        return context.cast(builder, done, types.boolean, signature.return_type)

    return signature, lower


def _work(context, outer, fields, description, inner, count):
    """What a thread of the team runs: void(void *shared)."""
    name = outer.module.get_unique_name(f"{outer.function.name}.region")
    function = ir.Function(outer.module, ir.FunctionType(ir.VoidType(), [POINTER]), name)
    function.linkage = "internal"
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    shared = builder.bitcast(function.args[0], fields.as_pointer())
    place = [cgutils.gep_inbounds(builder, shared, 0, field) for field in range(5)]
    pieces, size = builder.load(place[1]), builder.load(place[2])
    arguments = cgutils.unpack_tuple(builder, builder.load(place[4]), count)
    take, compute, end = (function.append_basic_block(name) for name in ("take", "compute", "end"))
    builder.branch(take)
    builder.position_at_end(take)
    piece = builder.atomic_rmw("add", place[0], I64(1), "monotonic")
    builder.cbranch(builder.icmp_signed("<", piece, pieces), compute, end)
    builder.position_at_end(compute)
    edges = [builder.sdiv(builder.mul(size, one), pieces) for one in (piece, builder.add(piece, I64(1)))]
    status, _ = context.call_internal_no_propagate(builder, description, inner, [*edges, *arguments])
    with builder.if_then(status.is_error, likely=False):
        builder.store(I32(1), place[3])
    builder.branch(take)
    builder.position_at_end(end)
    builder.ret_void()
    return function
