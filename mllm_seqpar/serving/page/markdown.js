// Markdown as elements. Text reaches the page as text nodes only, so that no answer can add elements, scripts or styles.

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const QUOTE = /^ {0,3}>\s?(.*)$/;
const SEPARATOR = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const INLINE = new RegExp(
  [
    "\\\\([\\\\`*_{}\\[\\]()#+\\-.!~|>])",
    "(`+)(.*?[^`])\\2(?!`)",
    "\\*\\*(?=\\S)(.*?\\S)\\*\\*",
    "\\*(?=[^\\s*])([^*]*[^\\s*])\\*",
    "(?<!\\w)__(?=\\S)(.*?\\S)__(?!\\w)",
    "(?<!\\w)_(?=[^\\s_])([^_]*[^\\s_])_(?!\\w)",
    "~~(?=\\S)(.*?\\S)~~",
    "!?\\[([^\\[\\]]*)\\]\\(([^()\\s]+)\\)",
    "(https?:\\/\\/[^\\s<>()\\[\\]]*[^\\s<>()\\[\\].,;:!?'\"*_])",
    "(\\n)",
  ].join("|"),
  "gs",
);
const DEEPEST = 8;

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function link(text, address) {
  let target;
  try {
    target = new URL(address);
  } catch {
    return text;
  }
  if (!["http:", "https:", "mailto:"].includes(target.protocol)) return text;
  const made = element("a", text);
  made.href = target.href;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

function inline(text, depth = 0) {
  if (depth > DEEPEST) return [text];
  const found = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    if (match.index > end) found.push(text.slice(end, match.index));
    end = match.index + match[0].length;
    const [, escaped, , code, bold, slanted, bold2, slanted2, struck, label, address, bare, newline] = match;
    const strong = bold ?? bold2, emphasis = slanted ?? slanted2;
    if (escaped !== undefined) found.push(escaped);
    else if (code !== undefined) found.push(element("code", code.trim()));
    else if (strong !== undefined) found.push(element("strong", ...inline(strong, depth + 1)));
    else if (emphasis !== undefined) found.push(element("em", ...inline(emphasis, depth + 1)));
    else if (struck !== undefined) found.push(element("del", ...inline(struck, depth + 1)));
    else if (address !== undefined) found.push(link(label || address, address));
    else if (bare !== undefined) found.push(link(bare, bare));
    else if (newline !== undefined) found.push(element("br"));
  }
  if (end < text.length) found.push(text.slice(end));
  return found;
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-")
    && SEPARATOR.test(lines[at + 1]) && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function beginsBlock(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, at);
}

// Each function takes lines and where its block begins, and returns the element and where the block ends.
function codeBlock(lines, at) {
  const mark = lines[at].match(FENCE)[1];
  let end = at + 1;
  while (end < lines.length && !(lines[end].trim().startsWith(mark) && !lines[end].trim().replaceAll(mark[0], ""))) end++;
  const made = element("pre", element("code", lines.slice(at + 1, end).join("\n")));
  made.tabIndex = 0; // it scrolls
  return [made, end + 1];
}

function quote(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  return [element("blockquote", ...blocks(lines.slice(at, end).map((line) => line.match(QUOTE)[1]), depth + 1)), end];
}

function table(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  const row = (line, name) => element("tr", ...cells(line).map((cell) => element(name, ...inline(cell))));
  const head = element("thead", row(lines[at], "th"));
  const made = element("div", element("table", head, element("tbody", ...lines.slice(at + 2, end).map((line) => row(line, "td")))));
  made.className = "table";
  return [made, end];
}

function list(lines, at, depth) {
  const [, indent, mark] = lines[at].match(ITEM);
  const ordered = /\d/.test(mark);
  const made = element(ordered ? "ol" : "ul");
  if (ordered) made.start = Number.parseInt(mark, 10);
  let end = at;
  while (end < lines.length) {
    const match = lines[end].match(ITEM);
    if (!match || match[1].length > indent.length + 1 || /\d/.test(match[2]) !== ordered || RULE.test(lines[end])) break;
    const inner = match[1].length + match[2].length + 1, own = [match[4]];
    for (end++; end < lines.length; end++) {
      const spaces = lines[end].search(/\S/), blank = spaces < 0;
      if (blank && !(end + 1 < lines.length && lines[end + 1].search(/\S/) >= Math.min(inner, 2))) break;
      if (!blank && spaces <= match[1].length + 1 && (ITEM.test(lines[end]) || beginsBlock(lines, end))) break;
      if (!blank && spaces < 2 && !lines[end - 1].trim()) break;
      own.push(lines[end].slice(Math.min(inner, Math.max(0, spaces))));
    }
    made.append(element("li", ...blocks(own, depth + 1, true)));
    let next = end;
    while (next < lines.length && !lines[next].trim()) next++;
    if (next < lines.length && ITEM.test(lines[next])) end = next; // a loose list
  }
  return [made, end];
}

function paragraph(lines, at, tight) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !beginsBlock(lines, end) && !ITEM.test(lines[end])) end++;
  const text = inline(lines.slice(at, end).map((line) => line.trim()).join("\n"));
  return [tight ? element("span", ...text) : element("p", ...text), end];
}

function blocks(lines, depth = 0, tight = false) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at], heading = line.match(HEADING);
    let made;
    if (!line.trim()) {
      at++;
      continue;
    }
    if (FENCE.test(line)) [made, at] = codeBlock(lines, at);
    else if (heading) [made, at] = [element(`h${Math.min(6, heading[1].length + 2)}`, ...inline(heading[2])), at + 1];
    else if (RULE.test(line)) [made, at] = [element("hr"), at + 1];
    else if (depth < DEEPEST && QUOTE.test(line)) [made, at] = quote(lines, at, depth);
    else if (isTable(lines, at)) [made, at] = table(lines, at);
    else if (depth < DEEPEST && ITEM.test(line)) [made, at] = list(lines, at, depth);
    else [made, at] = paragraph(lines, at, tight);
    found.push(made);
  }
  return found;
}

// Returns the elements of a text in Markdown, which may be cut anywhere.
export function render(text) {
  return blocks(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"));
}
