"""Adapters: Gymnasium, dm_env, custom factories and world models as environments."""
