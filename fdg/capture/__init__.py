"""The update step, captured and compiled: loss, backward, clip and Adam as one piece of machine code (`--compile-update`).

    first update    the step is traced (torch.fx), every tensor that the trace holds becomes an input, so that it is read
                    anew at each update; AOTInductor compiles it, or an earlier run has: artifacts are kept by a hash of
                    the trace, its shapes and types, torch and the CPU. Then it runs, and the same update is made
                    by Python: gradients and results have to agree.
    later updates   the arguments are looked at (structure, shapes, strides), put into a list, and the code runs. Updates
                    2, 10, 100 and every thousandth are made by Python as well, and compared.

What Python would do differently next time is not in the trace. Attributes of the loss function's object that it reads are
therefore watched. Where a branch depends on tensors (`if x.isfinite().all()`), the code computes the condition: if it is not
what it was in the trace, nothing is written, and Python makes this update. Whatever cannot be captured, or no longer agrees, is told, and Python goes on by itself.
"""

from __future__ import annotations

from fdg.capture.sites import Captures

__all__ = ["Captures"]
