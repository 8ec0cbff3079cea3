"""What compiled programs write, on a program written by hand."""

import dataclasses

import pytest

from jaxscale.training.planning.hlo import Transfer, transfers
from tests.hlo import written


PROGRAM = """\
HloModule jit_run, is_scheduled=true, entry_computation_layout={(f32[8,64]{1,0})->()}

%wrapped (p: f32[8,64]) -> bf16[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  ROOT %convert = bf16[8,64]{1,0} convert(%p)
}

%in_place (p.1: f32[8,64], p.2: f32[64], i: s32[]) -> f32[8,64] {
  %p.1 = f32[8,64]{1,0} parameter(0)
  %p.2 = f32[64]{0} parameter(1)
  %row = f32[1,64]{1,0} bitcast(%p.2)
  %i = s32[] parameter(2)
  %at = f32[8,64]{1,0} dynamic-update-slice(%p.1, %row, %i, %i)
  ROOT %as = f32[8,64]{1,0} bitcast(%at)
}

%anew (p.3: f32[8,64], p.4: f32[1,64], i.1: s32[]) -> (f32[8,64], f32[8,64]) {
  %p.3 = f32[8,64]{1,0} parameter(0)
  %twice = f32[8,64]{1,0} add(%p.3, %p.3)
  %p.4 = f32[1,64]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %at.1 = f32[8,64]{1,0} dynamic-update-slice(%twice, %p.4, %i.1, %i.1)
  ROOT %both = (f32[8,64]{1,0}, f32[8,64]{1,0}) tuple(%twice, %at.1)
}

%product (p.5: f32[8,64], p.6: f32[64,64]) -> (f32[8,64], s8[99999]) {
  %p.5 = f32[8,64]{1,0} parameter(0)
  %p.6 = f32[64,64]{1,0} parameter(1)
  %call = (f32[8,64]{1,0}, s8[99999]{0}) custom-call(%p.5, %p.6), \
custom_call_target="__cublas$gemm"
  %first = f32[8,64]{1,0} get-tuple-element(%call), index=0
  %room = s8[99999]{0} get-tuple-element(%call), index=1
  ROOT %both.1 = (f32[8,64]{1,0}, s8[99999]{0}) tuple(%first, %room)
}

%body (carry: (s32[], f32[8,64])) -> (s32[], f32[8,64]) {
  %carry = (s32[], /*index=1*/f32[8,64]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%carry), index=0
  %x = f32[8,64]{1,0} get-tuple-element(%carry), index=1
  %slice = f32[4,64]{1,0} dynamic-slice(%x, %n, %n), dynamic_slice_sizes={4,64}
  %row.1 = f32[1,64]{1,0} slice(%slice), slice={[0:1], [0:64]}
  %next = f32[8,64]{1,0} dynamic-update-slice(%x, %row.1, %n, %n)
  ROOT %after = (s32[], f32[8,64]{1,0}) tuple(%n, %next)
}

%condition (carry.1: (s32[], f32[8,64])) -> pred[] {
  %carry.1 = (s32[], f32[8,64]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

%one (a: f32[8,64]) -> f32[8,64] {
  %a = f32[8,64]{1,0} parameter(0)
  ROOT %turned = f32[8,64]{0,1} transpose(%a), dimensions={0,1}
}

%other (b: f32[8,64]) -> f32[8,64] {
  ROOT %b = f32[8,64]{1,0} parameter(0)
}

ENTRY %main (x.1: f32[8,64], w: f32[64,64], i.2: s32[]) -> (f32[8,64], f32[8,64]) {
  %x.1 = f32[8,64]{1,0} parameter(0)
  %w = f32[64,64]{1,0} parameter(1)
  %i.2 = s32[] parameter(2)
  %low = bf16[8,64]{1,0} fusion(%x.1), kind=kLoop, calls=%wrapped
  %kernel = (bf16[8,64]{1,0}, pred[7]{0}) custom-call(%low, %w), \
custom_call_target="mosaic_gpu_v2", output_to_operand_aliasing={{0}: (0, {})}
  %put = f32[8,64]{1,0} fusion(%x.1, %w, %i.2), kind=kLoop, calls=%in_place
  %put.1 = (f32[8,64]{1,0}, f32[8,64]{1,0}) fusion(%put, %w, %i.2), calls=%anew
  %by = (f32[8,64]{1,0}, s8[99999]{0}) fusion(%put, %w), kind=kCustom, calls=%product
  %taken = f32[8,64]{1,0} get-tuple-element(%by), index=0
  %start = ((f32[8,64]{1,0}), f32[32,64]{1,0}) all-gather-start(%taken), dimensions={0}
  %done = f32[32,64]{1,0} all-gather-done(%start)
  %carry.2 = (s32[], f32[8,64]{1,0}) tuple(%i.2, %taken)
  %loop = (s32[], f32[8,64]{1,0}) while(%carry.2), condition=%condition, body=%body
  %out = f32[8,64]{1,0} get-tuple-element(%loop), index=1
  %if = f32[8,64]{1,0} conditional(%i.2, %out, %out), \
branch_computations={%one, %other}, metadata={op_name="%cond"}
  %copied = f32[8,64]{1,0} copy(%if)
  %result = f32[8,64]{1,0} negate(%copied)
  ROOT %results = (f32[8,64]{1,0}, f32[8,64]{1,0}) tuple(%copied, %result)
}
"""


def test_what_a_program_writes():
    row, whole = 64 * 4, 8 * 64 * 4
    assert [dataclasses.astuple(w) for w in written(PROGRAM, 7)] == [
        ("fusion convert", "bf16[8,64]", whole // 2, False),
        # Its first result takes the place of an operand.
        ("custom-call mosaic_gpu_v2", "pred[7]", 7, False),
        ("fusion dynamic-update-slice", "f32[8,64]", row, False),
        # An update of what the fusion makes itself is no update in place.
        ("fusion add dynamic-update-slice", "f32[8,64]", whole, False),
        ("fusion add dynamic-update-slice", "f32[8,64]", whole, False),
        ("fusion custom-call __cublas$gemm", "f32[8,64]", whole, False),
        ("all-gather-start", "f32[32,64]", 4 * whole, False),
        ("dynamic-slice", "f32[4,64]", 4 * row, True),
        ("slice", "f32[1,64]", row, True),
        ("dynamic-update-slice", "f32[8,64]", row, True),
        ("transpose", "f32[8,64]", whole, False),
        # A copy counts although it is a result; what computes the other does not.
        ("copy", "f32[8,64]", whole, False),
    ]
    assert len(written(PROGRAM, whole)) == 6
    assert written(PROGRAM, 4 * whole + 1) == []


SENDING = """\
%fused (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %d = f32[8]{0} dot(%p, %p)
}

%layer (carry: (f32[8], f32[32])) -> (f32[8], f32[32]) {
  %carry = (f32[8]{0}, f32[32]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%carry), index=0
  %now = f32[32]{0} get-tuple-element(%carry), index=1
  %start = ((f32[8]{0}), f32[32]{0}) all-gather-start(%x), \
replica_groups=mesh['pipe'=2,'fsdp'=4] {'fsdp'}, dimensions={0}
  %used = f32[8]{0} custom-call(%x, %now), custom_call_target="mosaic_gpu_v2", \
metadata={op_name="jit(f)/my_kernel/mpmd_map"}
  %done = f32[32]{0} all-gather-done(%start)
  %next = f32[32]{0} bitcast(%done)
  %sum = f32[8]{0} all-reduce(%used), replica_groups=[2,4]<=[8], to_apply=%fused
  ROOT %after = (f32[8]{0}, f32[32]{0}) tuple(%sum, %next)
}

%condition (carry: (f32[8], f32[32])) -> pred[] {
  %carry.1 = (f32[8]{0}, f32[32]{0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: f32[8], b: f32[32]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %b = f32[32]{0} parameter(1)
  %send = ((f32[8]{0}), f32[8]{0}) collective-permute-start(%a), \
source_target_pairs={{0,4},{1,5},{2,6},{3,7}}
  %first = (f32[8]{0}, f32[32]{0}) tuple(%a, %b)
  %loop = (f32[8]{0}, f32[32]{0}) while(%first), condition=%condition, body=%layer, \
backend_config={"known_trip_count":{"n":"7"}}
  %fusion = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused
  %got = f32[8]{0} collective-permute-done(%send)
  ROOT %sum.1 = f32[8]{0} add(%got, %fusion)
}
"""


def test_what_a_program_sends_and_behind_what():
    send, gather, reduce = transfers(SENDING)
    assert send == Transfer(
        operation="collective-permute",
        axes=frozenset({"pipe"}),
        size=32,
        group=2,
        trips=(),
        loop="ENTRY",
        behind=("my_kernel", "product"),
        ahead=False,
    )
    assert gather == Transfer(
        operation="all-gather",
        axes=frozenset({"fsdp"}),
        size=128,
        group=4,
        trips=(7,),
        loop="layer",
        behind=("my_kernel",),
        ahead=True,
    )
    assert (reduce.operation, reduce.behind) == ("all-reduce", None)
    assert (reduce.axes, reduce.group, reduce.times) == ({"fsdp"}, 4, 7)
    assert (send.hidden, gather.hidden, reduce.hidden) == (True, True, False)
    assert (send.sent, gather.sent, reduce.sent) == (32, 96, 2 * 32 * 3 / 4)
    assert all(Transfer.from_json(x.to_json()) == x for x in (send, gather, reduce))


@pytest.mark.parametrize(
    ("written", "axes", "group"),
    [
        ("replica_groups=[2,4]<=[4,2]T(1,0)", {"x"}, 4),
        ("replica_groups=[4,2]<=[8]", {"y"}, 2),
        ("replica_groups={{0,1,2,3,4,5,6,7}}", {"x", "y"}, 8),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", {"x"}, 2),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", {"x", "y"}, 4),
        ("replica_groups=mesh['x'=4,'y'=2] {'x':(2)2}", {"x"}, 2),
        ("replica_groups={}", {"x", "y"}, 8),
    ],
)
def test_the_axes_of_a_collective_however_its_groups_are_written(written, axes, group):
    line = f"%r = f32[8]{{0}} all-reduce(%used), {written}, to_apply=%fused\n"
    before = SENDING.index("%sum = f32[8]")
    program = SENDING[:before] + line + SENDING[SENDING.index("  ROOT %after") :]
    program = program.replace("tuple(%sum, %next)", "tuple(%r, %next)")
    found = transfers(program, {"x": 4, "y": 2})[-1]
    assert (found.operation, found.axes, found.group) == ("all-reduce", axes, group)
