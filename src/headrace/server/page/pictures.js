// Pictures for a message: small ones as they are, others drawn anew, as the server takes 4 MiB in one
// request and a conversation is sent whole each time.

const TAKEN = ["image/jpeg", "image/png", "image/webp", "image/gif", "image/bmp"];
const MOST_FILE = 20 << 20; // Bytes, as the server has it.
const MOST_SENT = 1 << 20;
const SIDE = 2048; // Pixels: models of today look at no more.
const QUALITY = [0.9, 0.75, 0.5];

export const isPicture = (file) => file.type.startsWith("image/") || /\.(?:png|jpe?g|gif|webp|bmp|heic|avif|tiff?)$/i.test(file.name);

export const asUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** As a JPEG whose longest side is `SIDE` at most, on white where it is transparent. */
async function smaller(bitmap) {
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * scale)));
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const drawing = canvas.getContext("2d");
  drawing.fillStyle = "#fff";
  drawing.fillRect(0, 0, width, height);
  drawing.imageSmoothingQuality = "high";
  drawing.drawImage(bitmap, 0, 0, width, height);
  for (const quality of QUALITY) {
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", quality));
    if (blob && blob.size <= MOST_SENT) return { blob, note: `made smaller: ${width} × ${height}` };
  }
  return null;
}

/** {name, part} of a message; throws a sentence where the file cannot be one. */
export async function picture(file, name, size) {
  if (file.size > MOST_FILE) throw new Error(`${name} has ${size(file.size)}; at most ${size(MOST_FILE)} are taken.`);
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${name} is no picture that this browser reads: jpeg, png, webp, gif and bmp are taken.`);
  }
  try {
    const small = TAKEN.includes(file.type) && file.size <= MOST_SENT;
    const { blob, note } = small ? { blob: file } : (await smaller(bitmap)) ?? {};
    if (!blob) throw new Error(`${name} cannot be made smaller than ${size(MOST_SENT)}, which is the most that is sent.`);
    const part = { type: "image_url", image_url: { url: await asUrl(blob) } };
    return { name: note ? `${name} (${note})` : name, part };
  } finally {
    bitmap.close();
  }
}
