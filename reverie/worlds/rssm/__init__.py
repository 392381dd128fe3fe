"""The recurrent state-space model (RSSM) of DreamerV3."""
