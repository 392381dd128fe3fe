// The kernels of a residual block. `compute_statistics` is launched once, for the input;
// then `convolve` twice, and the second launch also adds the shortcut.

struct Arguments {
  const bf16 *x, *bias;  // feature map, and the bias added before its norm
  const float *scale, *shift;                   // of the norm
  const bf16 *weight, *shortcut, *output_bias;  // the last two are added to the output
  // per part of `x` and channel: mean, and sum of squared deviations
  const float* sums;
  float *stats, *out_sums;  // outputs: mean and 1 / std of `x`; `sums` of the output
  bf16* out;
  float eps;
};

// Stores mean and sum of squared deviations of this block's part, per channel.
DEVICE void store_sums(const Scratch& scratch, float* sums) {
  const u32 c = threadIdx.x;
  if (c >= CHANNELS) return;
  float mean, square;
  merge_warps(scratch, c, mean, square);
  sums += (size_t)blockIdx.x * 2 * CHANNELS + c;
  sums[0] = mean;
  sums[CHANNELS] = square;
}

KERNEL compute_statistics(Arguments a) {
  SHARED_MEMORY(Scratch);
  const Position position;
  uint4 values[8];
  UNROLL for (int p = 0; p < 8; p++) values[p] = load4(a.x + position.at(p));
  warp_statistics(values, scratch, position);
  store_sums(scratch, a.out_sums);
}

KERNEL convolve(Arguments a) {
  SHARED_MEMORY(Scratch);
  const Position position;
  uint4 *const weights = data, *const tile = data + WEIGHTS, v[LOADS], out[8];
  copy_weights(weights, a.weight);
  load_rows(v, a.x, position);
  const Norm norm(a.bias, a.scale, a.shift);
  const float* const parts = a.sums + (size_t)position.image * PARTS * 2 * CHANNELS;
  compute_norm(norm, parts, a.stats, a.eps, scratch, position);
  clear_borders(tile);
  sync_block();
  store_rows(v, tile, scratch, position);
  wait_copies();
  sync_block();
  Sums sums = {};
  multiply(tile, weights, position, sums);
  if (a.shortcut) add_shortcut(sums, a.shortcut, a.output_bias, position);
  store_output(sums, a.out, out, position);
  if (a.out_sums) {
    warp_statistics(out, scratch, position);
    store_sums(scratch, a.out_sums);
  }
}
