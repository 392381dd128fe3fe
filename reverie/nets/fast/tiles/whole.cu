// A residual block at once, by a cluster that has a whole map in its shared memory.
//
// Each block tells all others what it measured, and its neighbours the lines that they
// need as well; the map in the middle is written for the backward pass only.

static_assert(SPLIT == PARTS && SPLIT > 1 && TALL == 8 && HALVES == 1, "");

struct Arguments {
  const u16 *x, *first;
  const float *scale0, *shift0, *scale1, *shift1;
  const u16 *weight0, *bias0, *weight1, *last;
  float *stats0, *stats1;
  u16 *middle, *out;
  float eps;
};

struct Whole : Room {
  float parts[2][PARTS][2][CHANNELS];  // of both norms
};

// What this block measured, for all blocks; who comes back has heard from all.
DEVICE void share(Whole& room, int norm, const Place& place) {
  const u32 c = threadIdx.x;
  if (c < CHANNELS) {
    float mean, square;
    merge_warps(room, c, mean, square);
    for (u32 other = 0; other < SPLIT; other++) {
      tell(&room.parts[norm][place.part][0][c], other, mean);
      tell(&room.parts[norm][place.part][1][c], other, square);
    }
  }
  arrive();
  wait();
}

// The activation of what came out, here and where neighbours need it.
DEVICE void store_middle(uint4 (&out)[8], uint4* tile, const Whole& room,
                         const Place& place) {
  float gain[8], lift[8];
  recall(room.gain + place.channel, gain);
  recall(room.lift + place.channel, lift);
  UNROLL for (int p = 0; p < 8; p++) {
    const u32 line = place.line + p / 2;
    uint4* const to =
        tile + tile_at(place.column + p % 2 * 8 + place.lane / 4 + 1, place.channel / 8);
    activate(out[p], gain, lift);
    to[(line + 1) * PITCH * CHUNKS] = out[p];
    if (line == 0 && place.part > 0)
      tell4(to + (TALL + 1) * PITCH * CHUNKS, place.part - 1, out[p]);
    if (line == TALL - 1 && place.part + 1 < PARTS) tell4(to, place.part + 1, out[p]);
  }
}

KERNEL whole_block(Arguments a) {
  ROOM(Whole);
  const Place place;
  arrive();  // no block writes to one that has not begun
  uint4 *const weights = data, *const tile = data + 2 * WEIGHTS, v[LOADS], out[8];
  load_lines(v, a.x, place);
  const Norm norm0(a.first, a.scale0, a.shift0), norm1(a.bias0, a.scale1, a.shift1);
  send_weights(weights, a.weight0);
  send_weights(weights + WEIGHTS, a.weight1);
  clear_sides(tile);
  UNROLL for (int p = 0; p < 8; p++) out[p] = v[p + 1];  // a load is a line
  measure(out, room, place);
  wait();
  share(room, 0, place);
  find_norm(norm0, room.parts[0][0][0], a.stats0, a.eps, room, place);
  meet_block();
  store_lines(v, tile, room, place);
  await_sent();
  meet_block();
  {
    Sums sums = {};
    multiply(tile, weights, place, sums);
    store_out(sums, a.middle, out, place);
  }
  measure(out, room, place);
  share(room, 1, place);  // from now on, nobody needs the tiles as they are
  find_norm(norm1, room.parts[1][0][0], a.stats1, a.eps, room, place);
  meet_block();
  store_middle(out, tile, room, place);
  arrive();
  wait();
  Sums sums = {};
  multiply(tile, weights + WEIGHTS, place, sums);
  add_beside(sums, a.x, a.last, place);
  store_out(sums, a.out, out, place);
}
