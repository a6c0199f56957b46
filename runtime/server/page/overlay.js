// Draws, over an image, which of its patches the cache holds.
"use strict";

const VEIL = "10, 16, 22"; // as in page.css
const DARKEST = 0.88;

// `patches`: rows, columns, region [left, top, width, height] in shares of the image, held (a share of KV heads a patch).
// `most`: the share that is drawn clear.
function drawPatches(canvas, image, patches, most) {
  const scale = 2; // of the image's pixels on the screen, so that lines are sharp
  canvas.width = image.clientWidth * scale;
  canvas.height = image.clientHeight * scale;
  const draw = canvas.getContext("2d");
  const [left, top, width, height] = patches.region;
  const wide = (width * canvas.width) / patches.columns;
  const high = (height * canvas.height) / patches.rows;
  draw.fillStyle = `rgba(${VEIL}, ${DARKEST})`;
  draw.fillRect(0, 0, canvas.width, canvas.height); // what the model does not see at all
  patches.held.forEach((share, patch) => {
    const x = left * canvas.width + (patch % patches.columns) * wide;
    const y = top * canvas.height + Math.floor(patch / patches.columns) * high;
    draw.clearRect(x, y, wide, high);
    draw.fillStyle = `rgba(${VEIL}, ${DARKEST * (1 - (most ? share / most : 0))})`;
    draw.fillRect(x, y, wide, high);
    draw.lineWidth = 1;
    draw.strokeStyle = "rgba(255, 255, 255, 0.25)";
    draw.strokeRect(x, y, wide, high);
    if (share === 0) {
      draw.strokeStyle = "rgba(255, 120, 100, 0.8)"; // nobody holds it
      draw.beginPath();
      draw.moveTo(x + wide * 0.3, y + high * 0.3);
      draw.lineTo(x + wide * 0.7, y + high * 0.7);
      draw.moveTo(x + wide * 0.7, y + high * 0.3);
      draw.lineTo(x + wide * 0.3, y + high * 0.7);
      draw.stroke();
    }
  });
}

// The patch under a pointer event on the canvas, null outside the grid.
function patchAt(event, canvas, patches) {
  const box = canvas.getBoundingClientRect();
  const [left, top, width, height] = patches.region;
  const column = Math.floor((((event.clientX - box.left) / box.width - left) / width) * patches.columns);
  const row = Math.floor((((event.clientY - box.top) / box.height - top) / height) * patches.rows);
  const inside = column >= 0 && column < patches.columns && row >= 0 && row < patches.rows;
  return inside ? { row, column, share: patches.held[row * patches.columns + column] } : null;
}
