"""`local`: everything in one place. With one actor it is the user's own loop, untouched."""

from fdg.policies.base import Policy


class Local(Policy):
    """All in one fragment, in this process."""

    name = "local"
    fragments = {"local": ("env", "actor", "buffer", "learner")}
