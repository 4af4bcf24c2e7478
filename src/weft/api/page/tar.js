// A tar of a few files, as the server takes adapters.

const BLOCK = 512;

/** A Blob with a tar of `[{name, file}]`, in the POSIX format. */
export function tarOf(files) {
  const parts = [];
  for (const { name, file } of files) {
    parts.push(headerOf(name, file.size), file, new Uint8Array((BLOCK - (file.size % BLOCK)) % BLOCK));
  }
  parts.push(new Uint8Array(2 * BLOCK));
  return new Blob(parts);
}

function headerOf(name, size) {
  const header = new Uint8Array(BLOCK);
  const write = (text, at) => header.set(new TextEncoder().encode(text), at);
  write(name.slice(0, 99), 0);
  write("0000644\0", 100);
  write(`${size.toString(8).padStart(11, "0")}\0`, 124);
  write("00000000000\0", 136);
  write("        ", 148); // the checksum counts as spaces
  write("0", 156);
  write("ustar\x0000", 257);
  const sum = header.reduce((total, byte) => total + byte, 0);
  write(`${sum.toString(8).padStart(6, "0")}\0 `, 148);
  return header;
}
