"""Vectorized environments: several copies stepped together, as `reverie.api.VecEnv`."""
