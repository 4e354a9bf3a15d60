// A canvas that knows its size in CSS pixels, is sharp on dense screens, and is drawn only where it can be seen.

export function createSurface(canvas) {
  const context = canvas.getContext("2d");
  const surface = { canvas, context, width: 0, height: 0, isVisible: false, changed: true };

  function resize() {
    const box = canvas.getBoundingClientRect();
    const ratio = Math.min(devicePixelRatio || 1, 2);
    surface.width = box.width;
    surface.height = box.height;
    const width = Math.max(1, Math.round(box.width * ratio));
    const height = Math.max(1, Math.round(box.height * ratio));
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    surface.changed = true;
  }

  new ResizeObserver(resize).observe(canvas);
  new IntersectionObserver((entries) => {
    surface.isVisible = entries.at(-1).isIntersecting;
    surface.changed = true;
  }).observe(canvas);

  // Clears and scales; false if there is nothing to draw on.
  surface.begin = () => {
    if (surface.width < 1 || surface.height < 1) return false;
    const ratio = canvas.width / surface.width;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, surface.width, surface.height);
    return true;
  };

  return surface;
}

// One mark per outcome, told apart by shape as well as by colour.
export function drawMark(context, outcome, x, y, size, colours) {
  const half = size / 2;
  context.beginPath();
  if (outcome === "late" || outcome === "expired") {
    const sign = outcome === "late" ? 1 : -1;
    context.moveTo(x, y - half * sign);
    context.lineTo(x + half, y + half * sign);
    context.lineTo(x - half, y + half * sign);
    context.closePath();
    context.fillStyle = colours.bad;
    context.fill();
  } else if (outcome === "rejected") {
    context.moveTo(x - half, y - half);
    context.lineTo(x + half, y + half);
    context.moveTo(x + half, y - half);
    context.lineTo(x - half, y + half);
    context.strokeStyle = colours.reject;
    context.lineWidth = 2;
    context.stroke();
  } else if (outcome === "failed") {
    context.fillStyle = colours.bad;
    context.fillRect(x - half, y - half, size, size);
  } else if (outcome === "cancelled") {
    context.fillStyle = colours.muted;
    context.fillRect(x - half, y - 1, size, 2);
  } else {
    context.arc(x, y, half * 0.9, 0, 2 * Math.PI);
    context.fillStyle = colours.good;
    context.fill();
  }
}

// Diagonal lines over a bar: this part is beyond the target, or was lost.
export function createHatch(context, colour) {
  const tile = document.createElement("canvas");
  tile.width = 6;
  tile.height = 6;
  const brush = tile.getContext("2d");
  brush.strokeStyle = colour;
  brush.lineWidth = 2;
  brush.beginPath();
  for (const shift of [-6, 0, 6]) {
    brush.moveTo(shift, 6);
    brush.lineTo(shift + 6, 0);
  }
  brush.stroke();
  return context.createPattern(tile, "repeat");
}
