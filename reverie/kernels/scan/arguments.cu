// Structs that are part of the kernels' arguments. `tensors.py` has named tuples of the
// same names, with the members in the same order, and explains them.

struct ScanWeights {
  const bf16 *in0_weight, *in0_bias;
  const float* in0_scale;
  const bf16 *in1_weight, *in1_bias;
  const float* in1_scale;
  const bf16 *hid_weight, *hid_bias;
  const float* hid_scale;
  const bf16 *gru_weight, *gru_bias, *obs_weight;
  const float* obs_scale;
  const bf16 *logit_weight, *logit_bias;
};

struct SavedActivations {  // (time, row, width)
  bf16 *deter, *stoch, *logits, *prev_deter, *prev_stoch, *in0_pre, *in1_pre, *hid_pre,
      *gates, *obs_pre;
  float* inv_rms;  // (time, row, 4): of in0, in1, hid and obs
  bf16 *shared_input, *hid_act, *obs_act;
};
