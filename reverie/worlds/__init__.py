"""World models: the RSSM of DreamerV3, VTA and Δ-IRIS, one subpackage each."""
