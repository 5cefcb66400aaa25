"""`multi_learner`: a learner in every worker, gradients all-reduced (data-parallel PPO)."""

from fdg.policies.base import Policy


class MultiLearner(Policy):
    """{env + actor + learner} × workers, {buffer} × shards: each learner takes some rows of every batch."""

    name = "multi_learner"
    fragments = {"workers": ("env", "actor", "learner"), "replay": ("buffer",)}
    replicated = ("learner",)
