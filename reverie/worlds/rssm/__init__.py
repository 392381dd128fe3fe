"""The recurrent state-space model of DreamerV3."""
