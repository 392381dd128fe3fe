// The way there.

struct Arguments {
  const u16 *x, *bias;
  const float *scale, *shift;
  float* stats;
  u16* out;
  float eps;
};

KERNEL norm_forward(Arguments a) {
  ROOM(Room<2>);
  const Place place;
  send_for({a.x}, data, room.gates, place);
  float first[8], sums[2][8] = {}, x[8];
  spread(load4(a.x + place.map + place.column), first);
  UNROLL for (int i = 0; i < PIECES; i++) {
    await(room.gates + i);
    UNROLL for (int k = i * LOADS / PIECES; k < (i + 1) * LOADS / PIECES; k++) {
      spread(data[k * THREADS + threadIdx.x], x);
      UNROLL for (int j = 0; j < 8; j++) {
        const float away = x[j] - first[j];
        sums[0][j] += away;
        sums[1][j] += away * away;
      }
    }
  }
  sum_up(sums, room, place, true);

  EACH_CHANNEL {
    const float sum = total<2>(room.all[0], 0, c), mean = sum / PIXELS;
    const float lead = a.bias ? number(a.bias + c) : 0.f;
    room.one[c] = mean + number(a.x + place.map + c) + lead;
    room.two[c] = total<2>(room.all[0], 1, c) - sum * mean;
  }
  meet_block();
  EACH_CHANNEL {
    const float away = room.one[c] - grouped(room.one, c) / PER;
    room.three[c] = room.two[c] + PIXELS * away * away;
  }
  meet_block();
  float* const gains = room.warps[0];  // which are no longer needed
  float* const lifts = gains + CHANNELS;
  EACH_CHANNEL {
    const float middle = grouped(room.one, c) / PER;
    const float root = one_by_root(grouped(room.three, c) / (PIXELS * PER) + a.eps);
    if (place.rank == 0) {
      float* stats = a.stats + (size_t)place.row * 2 * CHANNELS + c;
      stats[0] = middle;
      stats[CHANNELS] = root;
    }
    const float gain = root * a.scale[c], lead = a.bias ? number(a.bias + c) : 0.f;
    gains[c] = gain;
    lifts[c] = a.shift[c] - (middle - lead) * gain;
  }
  meet_block();
  float gain[8], lift[8];
  recall(gains + place.column, gain);
  recall(lifts + place.column, lift);
  _Pragma("unroll 4") for (int k = 0; k < LOADS; k++) {
    spread(data[k * THREADS + threadIdx.x], x);
    UNROLL for (int j = 0; j < 8; j += 2) {
      const float z = x[j] * gain[j] + lift[j];
      const float y = x[j + 1] * gain[j + 1] + lift[j + 1];
      float open, wide;
      sigmoids(z, y, open, wide);
      x[j] = z * open;
      x[j + 1] = y * wide;
    }
    store4(a.out + place.at(k), gather(x));
  }
}
