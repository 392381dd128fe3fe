"""The world model of dreamerv3-torch, an earlier DreamerV3."""
