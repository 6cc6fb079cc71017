// Files of the bundle, by their names in it, each compared with its digest before it is used.

/** Bytes of a file below `base`, the address of the bundle's folder. */
export function overHttp(base) {
  return async (name) => {
    const response = await fetch(new URL(name, base));
    if (!response.ok) throw new Error(`${name}: the server answered ${response.status}`);
    return new Uint8Array(await response.arrayBuffer());
  };
}

/** `read`, refusing a file whose size or sha256 is not what `files` ({name: {size, sha256}}) says. */
export function verified(read, files) {
  return async (name) => {
    const entry = files[name];
    if (!entry) throw new Error(`${name}: not among the files of web/bundle.json`);
    const bytes = await read(name);
    if (bytes.length !== entry.size || (await sha256(bytes)) !== entry.sha256) {
      throw new Error(`${name}: damaged, its digest is not the bundle's. Get the bundle again.`);
    }
    return bytes;
  };
}

async function sha256(bytes) {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (b) => b.toString(16).padStart(2, "0")).join("");
}
