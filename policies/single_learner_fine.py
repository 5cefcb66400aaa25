"""`single_learner_fine`: environments apart, inference beside the learner (SEED RL)."""

from fdg.policies.base import Policy


class SingleLearnerFine(Policy):
    """{env} × actors, {actor + buffer + learner}: observations up, actions down, every step."""

    name = "single_learner_fine"
    fragments = {"environments": ("env",), "learner": ("actor", "buffer", "learner")}
