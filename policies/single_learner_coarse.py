"""`single_learner_coarse`: actors collect with their environments, one learner updates (Acme, Sebulba)."""

from fdg.policies.base import Policy


class SingleLearnerCoarse(Policy):
    """{env + actor} × actors, {buffer + learner}: rows up, weights down, once per collection."""

    name = "single_learner_coarse"
    fragments = {"actors": ("env", "actor"), "learner": ("buffer", "learner")}
