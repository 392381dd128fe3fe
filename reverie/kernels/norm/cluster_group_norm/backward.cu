// The way back. The activation is made again, for the gradient of what comes after it.

struct Arguments {
  const u16 *x, *bias;
  const float *scale, *shift, *stats;
  const u16 *slope, *more;
  u16 *active, *dx;  // dx may be where slope is
  float* sums;
};

KERNEL norm_backward(Arguments a) {
  ROOM(Room<3>);
  const Place place;
  send_for({a.x, a.slope}, data, room.gates, place);
  uint4* const slopes = data + SHARE / 8;
  const float* stats = a.stats + (size_t)place.row * 2 * CHANNELS;
  EACH_CHANNEL {
    const float middle = stats[c] - (a.bias ? number(a.bias + c) : 0.f);
    const float gain = stats[CHANNELS + c] * a.scale[c];
    room.one[c] = middle;
    room.two[c] = gain;
    room.three[c] = a.shift[c] - middle * gain;
  }
  meet_block();
  float middle[8], gain[8], x[8], y[8];
  recall(room.one + place.column, middle);
  recall(room.two + place.column, gain);
  {
    float lift[8], sums[3][8] = {};
    recall(room.three + place.column, lift);
    for (int i = 0; i < PIECES; i++) {
      await(room.gates + i);
      UNROLL for (int n = 0; n < LOADS / PIECES; n++) {
        const int k = i * (LOADS / PIECES) + n, at = k * THREADS + threadIdx.x;
        spread(data[at], x);
        spread(slopes[at], y);
        UNROLL for (int j = 0; j < 8; j += 2) {
          const float z[2] = {x[j] * gain[j] + lift[j],
                              x[j + 1] * gain[j + 1] + lift[j + 1]};
          float open[2];
          sigmoids(z[0], z[1], open[0], open[1]);
          UNROLL for (int m = 0; m < 2; m++) {
            const float away = x[j + m] - middle[j + m];
            const float dz = y[j + m] * open[m] * (1.f + z[m] * (1.f - open[m]));
            sums[0][j + m] += dz;
            sums[1][j + m] += dz * away;
            sums[2][j + m] += away;
            x[j + m] = z[m] * open[m];
            y[j + m] = dz;
          }
        }
        store4(a.active + place.at(k), gather(x));
        slopes[at] = gather(y);
      }
    }
    sum_up(sums, room, place, true);
  }
  float* const lifted = room.warps[0];  // the room of warps is no longer needed
  float* const tilted = lifted + CHANNELS;
  EACH_CHANNEL {
    lifted[c] = total<3>(room.all[0], 0, c) * a.scale[c];
    tilted[c] = total<3>(room.all[0], 1, c) * stats[CHANNELS + c] * a.scale[c];
  }
  meet_block();
  EACH_CHANNEL {
    const float root = stats[CHANNELS + c];
    const float level = grouped(lifted, c) / (PIXELS * PER) * root;
    const float tilt = grouped(tilted, c) / (PIXELS * PER) * root * root;
    room.one[c] = level;
    room.three[c] = tilt;
    if (place.rank == 0) {
      const float dlift = total<3>(room.all[0], 0, c);
      const float away = total<3>(room.all[0], 2, c);
      float* to = a.sums + (size_t)place.row * 4 * CHANNELS + c;
      to[0] = dlift;
      to[CHANNELS] = total<3>(room.all[0], 1, c) * root;
      to[2 * CHANNELS] = dlift * room.two[c] - away * tilt - PIXELS * level;
      if (!a.more) to[3 * CHANNELS] = 0;
    }
  }
  meet_block();
  float flat[8], slant[8], extra[1][8] = {};
  recall(room.one + place.column, flat);
  recall(room.three + place.column, slant);
  UNROLL for (int j = 0; j < 8; j++) flat[j] -= middle[j] * slant[j];
  _Pragma("unroll 4") for (int k = 0; k < LOADS; k++) {
    const int at = k * THREADS + threadIdx.x;
    spread(data[at], x);
    spread(slopes[at], y);
    UNROLL for (int j = 0; j < 8; j++) x[j] = y[j] * gain[j] - x[j] * slant[j] - flat[j];
    if (a.more) {
      spread(load4(a.more + place.at(k)), y);
      UNROLL for (int j = 0; j < 8; j++) {
        extra[0][j] += y[j];
        x[j] += y[j];
      }
    }
    store4(a.dx + place.at(k), gather(x));
  }
  if (a.more) {
    if (SPLIT > 1) arrive();
    meet_block();  // before the room of warps is used again
    sum_up(extra, room, place, false);
    if (place.rank == 0) {
      float* to = a.sums + ((size_t)place.row * 4 + 3) * CHANNELS;
      EACH_CHANNEL to[c] = total<1>(room.all[0], 0, c);
    }
  }
}
