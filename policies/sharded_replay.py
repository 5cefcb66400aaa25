"""`sharded_replay`: the replay buffer in shards of its own, between actors and learner (Ape-X, synchronous)."""

from fdg.policies.base import Policy


class ShardedReplay(Policy):
    """{env + actor} × actors, {buffer} × shards, {learner}: each actor's rows go to its shard."""

    name = "sharded_replay"
    fragments = {"actors": ("env", "actor"), "replay": ("buffer",), "learner": ("learner",)}
