"""Distribution policies: which components run together. A policy is a declaration; the compiler does the rest."""

from fdg.policies.base import Policy
from fdg.policies.local import Local
from fdg.policies.multi_learner import MultiLearner
from fdg.policies.sharded_replay import ShardedReplay
from fdg.policies.single_learner_coarse import SingleLearnerCoarse
from fdg.policies.single_learner_fine import SingleLearnerFine

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Local, SingleLearnerCoarse, SingleLearnerFine, ShardedReplay, MultiLearner)
}

__all__ = ["POLICIES", "Local", "MultiLearner", "Policy", "ShardedReplay", "SingleLearnerCoarse", "SingleLearnerFine"]
