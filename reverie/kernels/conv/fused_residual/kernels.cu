// A residual block in three steps: measure, convolve, convolve and add the map.

struct Arguments {
  const u16 *x, *bias;  // a map, and what is to be added ahead of its norm
  const float *scale, *shift;
  const u16 *weight, *beside, *last;  // the last two are added at the end
  const float* sums;                  // of parts of the map
  float *stats, *found;               // its norm, and the sums of what comes out
  u16* out;
  float eps;
};

DEVICE void leave_sums(const Room& room, float* found) {
  const u32 c = threadIdx.x;
  if (c >= CHANNELS) return;
  float mean, square;
  merge_warps(room, c, mean, square);
  found += (size_t)blockIdx.x * 2 * CHANNELS + c;
  found[0] = mean;
  found[CHANNELS] = square;
}

KERNEL measure_parts(Arguments a) {
  ROOM(Room);
  const Place place;
  uint4 mine[8];
  UNROLL for (int p = 0; p < 8; p++) mine[p] = load4(a.x + place.at(p));
  measure(mine, room, place);
  leave_sums(room, a.found);
}

KERNEL convolve(Arguments a) {
  ROOM(Room);
  const Place place;
  uint4 *const weights = data, *const tile = data + WEIGHTS, v[LOADS], out[8];
  send_weights(weights, a.weight);
  load_lines(v, a.x, place);
  const Norm norm(a.bias, a.scale, a.shift);
  const float* const parts = a.sums + (size_t)place.row * PARTS * 2 * CHANNELS;
  find_norm(norm, parts, a.stats, a.eps, room, place);
  clear_sides(tile);
  meet_block();
  store_lines(v, tile, room, place);
  await_sent();
  meet_block();
  Sums sums = {};
  multiply(tile, weights, place, sums);
  if (a.beside) add_beside(sums, a.beside, a.last, place);
  store_out(sums, a.out, out, place);
  if (a.found) {
    measure(out, room, place);
    leave_sums(room, a.found);
  }
}
